"""Rules of targets: kernels, lowered programs that launch them, and compiled programs with their libraries."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import INT64_MAX, Line
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.kernels import Kernel, KernelCandidate, KernelLibrary, NumberParameter
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import FunctionalGraph, Program
from aotexport_runtime.schema.targets import CompiledHalf, CompiledProgram, LoweredProgram, Target
from aotexport_runtime.schema.values import NothingMeta, SizeArgument, TensorMeta, ValueMeta
from aotexport_runtime.validate.bounds import check_form, check_unique
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_graph
from aotexport_runtime.validate.subclasses import taken_apart
from aotexport_runtime.values.sizes import check_size

KERNEL = "kernel::"


def check_kernels(library: KernelLibrary, *, where: Place) -> None:
    """Refuse kernels with malformed names, grids over unknown arguments, or code outside of its pack."""
    faults = where.found
    check_declared(library, where)
    if where.found > faults:
        return
    sizes = {pack.architecture: pack.nbytes for pack in library.packs}
    for index, kernel in enumerate(library.kernels):
        with where.at("kernels", index) as here:
            _check_kernel(kernel, sizes, here)


def _check_kernel(kernel: Kernel, packs: dict[str, int], where: Place) -> None:
    names = [*(parameter.name for parameter in kernel.parameters), *kernel.grid_arguments]
    check_unique(names, f"argument of `{kernel.name}`", "name-twice/kernel-argument", where)
    integers = set(kernel.grid_arguments)
    for parameter in kernel.parameters:
        multiple = parameter.multiple_of if isinstance(parameter, NumberParameter) else parameter.alignment
        _check_power_of_two(multiple, f"alignment of `{parameter.name}` of `{kernel.name}`", where)
        if isinstance(parameter, NumberParameter) and parameter.type[0] in "iu":
            integers.add(parameter.name)
    for text in (text for line in kernel.lines for text in (line.file, line.function)):
        check_form(text, Line, f"origin of `{kernel.name}`", "text-malformed/kernel-line", where)
    for index, candidate in enumerate(kernel.candidates):
        with where.at("candidates", index) as here:
            _check_candidate(candidate, kernel, integers, packs, here)


def _check_power_of_two(number: int, subject: str, where: Place) -> None:
    if number & (number - 1):
        raise where.invalid(f"{subject} is {number}, no power of two", "kernel-malformed/power-of-two")


def _check_candidate(
    candidate: KernelCandidate, kernel: Kernel, integers: set[str], packs: dict[str, int], where: Place
) -> None:
    for axis in candidate.grid:
        check_size(axis, integers, where=where)
    for constant in candidate.constants:
        if isinstance(constant.value, int) and abs(constant.value) > INT64_MAX:
            raise where.invalid(f"constant `{constant.name}` has more than 64 bits", "kernel-malformed/constant")
    for binary in candidate.binaries:
        if binary.offset + binary.nbytes > packs[binary.architecture]:
            raise where.invalid(f"code of `{kernel.name}` lies outside of its pack", "kernel-malformed/pack")
        _check_power_of_two(
            binary.global_scratch_alignment, f"alignment of the scratch memory of `{kernel.name}`", where
        )


def check_lowered(lowered: LoweredProgram, program: Program, *, where: Place) -> None:
    """Refuse the record of a lowered program that does not fit its program."""
    functional = program.functional
    if functional is None:
        raise where.invalid(
            "the program has no functional graph to stand in for", "target-malformed/lowered-functional"
        )
    if (lowered.backward is None) != (functional.gradients is None):
        raise where.invalid(
            "it has a backward and the program has no gradients, or the other way round",
            "target-malformed/lowered-backward",
        )
    if lowered.backward is None and lowered.saved:
        raise where.at("saved").invalid(
            "it saves tensors for a backward that it does not have", "target-malformed/lowered-saved"
        )
    check_declared(lowered, where, Program=program)


def check_lowered_graph(
    graph: Graph,
    lowered: LoweredProgram,
    program: Program,
    kernels: Mapping[str, Kernel],
    namespaces: Collection[str],
    *,
    backward: bool,
    where: Place,
    limits: Limits = DEFAULT,
) -> None:
    """Refuse a lowered graph that breaks the calling convention, or launches a missing kernel.

    Args:
        graph: as decoded.
        lowered: the record that names it, checked.
        program: its program, checked.
        kernels: kernels of the target, by name.
        namespaces: namespaces of custom operators that the manifest declares.
        backward: whether it is the backward.
        where: its file, for errors.
        limits: the most that it may ask for.
    """
    functional = program.functional
    assert functional is not None
    symbols = {dimension.symbol for dimension in program.dimensions}
    faults = where.found
    check_graph(graph, symbols, {"kernel", *namespaces}, where=where, limits=limits, has_signatures=False)
    if where.found > faults:
        return
    returned = len(functional.mutations) + len(functional.outputs) + functional.intermediate_bases
    taken = len(taken_apart(program).inputs)
    inputs, outputs = taken, returned + lowered.saved
    if backward:
        assert functional.gradients is not None
        inputs, outputs = lowered.saved + len(functional.gradients.tangents), taken
    for field, count, expected in (("inputs", graph.inputs, inputs), ("outputs", graph.outputs, outputs)):
        if len(count) != expected:
            raise where.at(field).invalid(
                f"{len(count)} {field}; the calling convention has {expected}", "graph-interface/lowered"
            )
    values: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    said = enumerate(taken_apart(program).outputs, len(functional.mutations))
    numbers = [index for index, meta in said if meta is None]
    for index, output in enumerate(graph.outputs):
        is_tensor = isinstance(output, str) and isinstance(values.get(output), TensorMeta)
        if not is_tensor and not (output is None if backward else index in numbers):
            is_saved = not backward and index >= returned
            raise where.at("outputs", index).invalid(
                f"{'a saved value' if is_saved else f'output {index}'} is no tensor",
                "target-malformed/saved-value" if is_saved else "result-type/lowered-output",
            )
    for index, node in enumerate(graph.nodes):
        if node.op.startswith(KERNEL):
            _check_launch(node, kernels, values, where.at("nodes", index))
        elif node.op.partition("::")[0] not in ("aten", "python", *namespaces):
            raise where.at("nodes", index).invalid(
                f"operator `{node.op[:80]}` may not stand in a lowered graph", "operator-unlisted/lowered"
            )


def _check_launch(node: Node, kernels: Mapping[str, Kernel], values: Mapping[str, ValueMeta], where: Place) -> None:
    name = node.op.removeprefix(KERNEL)
    kernel = kernels.get(name)
    if kernel is None:
        raise where.invalid(f"there is no kernel `{name[:80]}`", "reference-missing/kernel")
    expected = {parameter.name for parameter in kernel.parameters} | set(kernel.grid_arguments)
    if node.args or set(node.kwargs) != expected or not isinstance(node.meta, NothingMeta):
        raise where.invalid(
            f"a launch of `{name[:80]}` has other arguments than the kernel", "operator-arguments/launch"
        )
    for parameter in kernel.parameters:
        argument = node.kwargs[parameter.name]
        if isinstance(parameter, NumberParameter):
            if not isinstance(argument, bool | int | float | SizeArgument):
                raise where.invalid(
                    f"argument `{parameter.name}` of `{name[:80]}` is no number", "argument-type/launch-number"
                )
            continue
        meta = values[argument] if isinstance(argument, str) else None
        if not isinstance(meta, TensorMeta) or meta.dtype != parameter.dtype:
            raise where.invalid(
                f"argument `{parameter.name}` of `{name[:80]}` is no tensor of {parameter.dtype}",
                "argument-type/launch-tensor",
            )
    for argument in kernel.grid_arguments:
        if not isinstance(node.kwargs[argument], int | SizeArgument):
            raise where.invalid(f"argument `{argument}` of `{name[:80]}` is no integer", "argument-type/launch-grid")


def check_target(target: Target, manifest: Manifest, *, name: str, where: Place) -> None:
    """Refuse a target whose programs or files are not in the bundle.

    Args:
        target: as decoded.
        manifest: of its bundle, checked.
        name: of its directory.
        where: its file, for errors.
    """
    if target.name != name:
        raise where.at("name").invalid(
            f"it is of target {target.name[:80]!r}, not `{name}`", "target-malformed/target-name"
        )
    faults = where.found
    check_declared(target, where)
    if where.found > faults:
        return
    listed = {entry.path for entry in manifest.files}
    named = [program.program for program in (*target.programs, *target.refusals)]
    check_unique(named, "program", "name-twice/target-program", where)
    having = {entry.name for entry in manifest.programs if name in entry.targets}
    missing = having - {program.program for program in target.programs}
    if missing:
        raise where.invalid(
            f"it lacks program {min(missing)!r}, which the manifest says it has", "target-malformed/lacking-program"
        )
    for index, program in enumerate(target.programs):
        here = where.at("programs", index)
        if program.program not in having:
            raise here.invalid(
                f"the manifest does not say that it has program {program.program[:80]!r}",
                "target-malformed/unlisted-program",
            )
        for library in _libraries(program):
            if f"targets/{name}/{library.file}" not in listed:
                raise here.invalid(f"library {library.file!r} is not listed in the manifest", "file-unlisted/library")


def check_compiled(compiled: CompiledProgram, program: Program, graph: Graph | None, *, where: Place) -> None:
    """Refuse a compiled program that does not fit its functional graph.

    Args:
        compiled: of a checked target.
        program: its program, checked.
        graph: the functional graph of `program`, checked; None: it has none.
        where: its place, for errors.
    """
    if program.functional is None or graph is None:
        raise where.invalid(
            f"program `{program.name}` has no functional graph to be compiled from",
            "target-malformed/compiled-functional",
        )
    gradients = program.functional.gradients
    partitions = {None} if gradients is None else {partition.name for partition in gradients.partitions}
    if (gradients is None) != (compiled.backward is None) or compiled.partition not in partitions:
        raise where.invalid(
            f"program `{program.name}` has no partition {str(compiled.partition)[:80]!r}", "target-malformed/partition"
        )
    check_declared(compiled, where, Program=program, Gradients=gradients)
    tensors = {value.name for value in (*graph.inputs, *graph.nodes) if isinstance(value.meta, TensorMeta)}
    for library in _libraries(compiled):
        for value in (*library.inputs, *library.results):
            if value not in tensors:
                raise where.invalid(
                    f"{value[:80]!r} is no tensor of the functional graph", "reference-missing/library-value"
                )
    _check_halves(compiled, program.functional, graph, tensors, where)


def _check_halves(
    compiled: CompiledProgram, functional: FunctionalGraph, graph: Graph, tensors: set[str], where: Place
) -> None:
    """Refuse libraries that take what their half of the partition does not have, or leave out what it returns."""
    gradients = functional.gradients
    tangents = [] if gradients is None else gradients.tangents
    names = [each.name for each in graph.inputs]
    given = set(names[: len(names) - len(tangents)])
    returned = len(functional.mutations) + len(functional.outputs) + functional.intermediate_bases
    halves = [(compiled.forward, given, graph.outputs[:returned])]
    if gradients is not None and compiled.backward is not None:
        saved = next(each.saved for each in gradients.partitions if each.name == compiled.partition)
        halves.append((compiled.backward, {*names, *saved}, graph.outputs[returned:]))
    for library, inputs, outputs in halves:
        for name in library.inputs:
            if name not in inputs:
                raise where.invalid(
                    f"library {library.file!r} takes {name[:80]!r}, which is no input", "target-malformed/library-input"
                )
        for output in outputs:
            if isinstance(output, str) and output in tensors - inputs - {*library.results}:
                raise where.invalid(
                    f"library {library.file!r} does not return {output[:80]!r}", "target-malformed/library-result"
                )


def _libraries(program: CompiledProgram) -> list[CompiledHalf]:
    return [program.forward] if program.backward is None else [program.forward, program.backward]
