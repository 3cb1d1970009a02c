"""Rules of targets: kernels, lowered programs that launch them, and compiled programs with their libraries."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aotexport_runtime.allowed.operators import KERNEL
from aotexport_runtime.errors import Place
from aotexport_runtime.schema import targets as records
from aotexport_runtime.schema.bounded import INT64_MAX, Line
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import CompiledProgram, Kernel, KernelLibrary, LoweredProgram, Target
from aotexport_runtime.schema.values import NothingMeta, SizeArgument, TensorMeta
from aotexport_runtime.validate.arguments import Values, check_form, check_unique, metas_of
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_graph
from aotexport_runtime.validate.program import returned_count
from aotexport_runtime.validate.trees import taken_apart
from aotexport_runtime.values.sizes import check_size


def check_kernels(library: KernelLibrary, *, where: Place) -> None:
    """Refuse kernels with malformed names, grids over unknown arguments, or code outside of its pack."""
    if not check_declared(library, where):
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
        multiple = parameter.multiple_of if isinstance(parameter, records.NumberParameter) else parameter.alignment
        _check_power_of_two(multiple, f"alignment of `{parameter.name}` of `{kernel.name}`", where)
        if isinstance(parameter, records.NumberParameter) and parameter.type[0] in "iu":
            integers.add(parameter.name)
    for text in (text for line in kernel.lines for text in (line.file, line.function)):
        check_form(text, Line, f"origin of `{kernel.name}`", "text-malformed/kernel-line", where)
    for index, candidate in enumerate(kernel.candidates):
        with where.at("candidates", index) as here:
            for axis in candidate.grid:
                check_size(axis, integers, where=here)
            for constant in candidate.constants:
                fits = not isinstance(constant.value, int) or abs(constant.value) <= INT64_MAX
                here.require(fits, f"constant `{constant.name}` has more than 64 bits", "kernel-malformed/constant")
            for binary in candidate.binaries:
                fits = binary.offset + binary.nbytes <= packs[binary.architecture]
                here.require(fits, f"code of `{kernel.name}` lies outside of its pack", "kernel-malformed/pack")
                subject = f"alignment of the scratch memory of `{kernel.name}`"
                _check_power_of_two(binary.global_scratch_alignment, subject, here)


def _check_power_of_two(number: int, subject: str, where: Place) -> None:
    where.require(not number & (number - 1), f"{subject} is {number}, no power of two", "kernel-malformed/power-of-two")


def check_lowered(lowered: LoweredProgram, program: Program, *, where: Place) -> None:
    """Refuse the record of a lowered program that does not fit its program."""
    functional = program.functional
    if functional is None:
        message = "the program has no functional graph to stand in for"
        raise where.invalid(message, "target-malformed/lowered-functional")
    is_alike = (lowered.backward is None) == (functional.gradients is None)
    message = "it has a backward and the program has no gradients, or the other way round"
    where.require(is_alike, message, "target-malformed/lowered-backward")
    fits = lowered.backward is not None or not lowered.saved
    message = "it saves tensors for a backward that it does not have"
    where.at("saved").require(fits, message, "target-malformed/lowered-saved")
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
    """Refuse a graph of a checked lowered program that breaks the calling convention, or launches none of `kernels`."""
    symbols = {dimension.symbol for dimension in program.dimensions}
    faults = where.found
    check_graph(graph, symbols, {"kernel", *namespaces}, where=where, limits=limits, has_signatures=False)
    if where.found > faults:
        return
    values = metas_of(graph)
    _check_convention(graph, lowered, taken_apart(program), values, where, backward=backward)
    for index, node in enumerate(graph.nodes):
        if node.op.startswith(KERNEL):
            _check_launch(node, kernels, values, where.at("nodes", index))
        else:
            message = f"operator `{node.op[:80]}` may not stand in a lowered graph"
            is_allowed = node.op.partition("::")[0] in ("aten", "python", *namespaces)
            where.at("nodes", index).require(is_allowed, message, "operator-unlisted/lowered")


def _check_convention(
    graph: Graph, lowered: LoweredProgram, program: Program, values: Values, where: Place, *, backward: bool
) -> None:
    functional = program.functional
    assert functional is not None
    returned, taken = returned_count(functional), len(program.inputs)
    inputs, outputs = taken, returned + lowered.saved
    if backward:
        assert functional.gradients is not None
        inputs, outputs = lowered.saved + len(functional.gradients.tangents), taken
    for field, count, expected in (("inputs", len(graph.inputs), inputs), ("outputs", len(graph.outputs), outputs)):
        message = f"{count} {field}; the calling convention has {expected}"
        where.at(field).require(count == expected, message, "graph-interface/lowered")
    numbers = [index for index, meta in enumerate(program.outputs, len(functional.mutations)) if meta is None]
    for index, output in enumerate(graph.outputs):
        is_tensor = isinstance(output, str) and isinstance(values.get(output), TensorMeta)
        if is_tensor or (output is None if backward else index in numbers):
            continue
        here = where.at("outputs", index)
        if not backward and index >= returned:
            raise here.invalid("a saved value is no tensor", "target-malformed/saved-value")
        raise here.invalid(f"output {index} is no tensor", "result-type/lowered-output")


def _check_launch(node: Node, kernels: Mapping[str, Kernel], values: Values, where: Place) -> None:
    name = node.op.removeprefix(KERNEL)
    kernel = kernels.get(name)
    if kernel is None:
        raise where.invalid(f"there is no kernel `{name[:80]}`", "reference-missing/kernel")
    expected = {parameter.name for parameter in kernel.parameters} | set(kernel.grid_arguments)
    fits = not node.args and set(node.kwargs) == expected and isinstance(node.meta, NothingMeta)
    where.require(fits, f"a launch of `{name[:80]}` has other arguments than the kernel", "operator-arguments/launch")
    for parameter in kernel.parameters:
        subject, argument = f"argument `{parameter.name}` of `{name[:80]}`", node.kwargs[parameter.name]
        if isinstance(parameter, records.NumberParameter):
            is_number = isinstance(argument, bool | int | float | SizeArgument)
            where.require(is_number, f"{subject} is no number", "argument-type/launch-number")
        else:
            meta = values[argument] if isinstance(argument, str) else None
            is_tensor = isinstance(meta, TensorMeta) and meta.dtype == parameter.dtype
            where.require(is_tensor, f"{subject} is no tensor of {parameter.dtype}", "argument-type/launch-tensor")
    for argument in kernel.grid_arguments:
        is_integer = isinstance(node.kwargs[argument], int | SizeArgument)
        where.require(is_integer, f"argument `{argument}` of `{name[:80]}` is no integer", "argument-type/launch-grid")


def check_target(target: Target, manifest: Manifest, *, name: str, where: Place) -> None:
    """Refuse a target of directory `name` whose programs or files are not in a checked manifest."""
    message = f"it is of target {target.name[:80]!r}, not `{name}`"
    where.at("name").require(target.name == name, message, "target-malformed/target-name")
    if not check_declared(target, where):
        return
    listed = {entry.path for entry in manifest.files}
    named = [program.program for program in (*target.programs, *target.refusals)]
    check_unique(named, "program", "name-twice/target-program", where)
    having = {entry.name for entry in manifest.programs if name in entry.targets}
    missing = min(having - {program.program for program in target.programs}, default="")
    message = f"it lacks program {missing!r}, which the manifest says it has"
    where.require(not missing, message, "target-malformed/lacking-program")
    for index, program in enumerate(target.programs):
        here = where.at("programs", index)
        message = f"the manifest does not say that it has program {program.program[:80]!r}"
        here.require(program.program in having, message, "target-malformed/unlisted-program")
        for library in _libraries(program):
            is_listed = f"targets/{name}/{library.file}" in listed
            here.require(is_listed, f"library {library.file!r} is not listed in the manifest", "file-unlisted/library")


def check_compiled(compiled: CompiledProgram, program: Program, graph: Graph | None, *, where: Place) -> None:
    """Refuse a compiled program of a checked target that does not fit its checked program, or its functional graph."""
    if program.functional is None or graph is None:
        message = f"program `{program.name}` has no functional graph to be compiled from"
        raise where.invalid(message, "target-malformed/compiled-functional")
    gradients = program.functional.gradients
    partitions: dict[str | None, tuple[str, ...]] = {None: ()}
    if gradients is not None:
        partitions = {each.name: each.saved for each in gradients.partitions}
    is_there = (gradients is None) == (compiled.backward is None) and compiled.partition in partitions
    message = f"program `{program.name}` has no partition {str(compiled.partition)[:80]!r}"
    where.require(is_there, message, "target-malformed/partition")
    check_declared(compiled, where, Program=program, Gradients=gradients)
    tensors = {name for name, meta in metas_of(graph).items() if isinstance(meta, TensorMeta)}
    for library in _libraries(compiled):
        for value in (*library.inputs, *library.results):
            message = f"{value[:80]!r} is no tensor of the functional graph"
            where.require(value in tensors, message, "reference-missing/library-value")
    names = [each.name for each in graph.inputs]
    given = {*names[: len(taken_apart(program).inputs)]}  # Tangents follow.
    returned = returned_count(program.functional)
    # Libraries take what their half of the partition has, and return what it does. Of fewer tangents, the engine looks.
    kept = {*names, *partitions[compiled.partition]}
    halves = [
        (given, graph.outputs[:returned]),
        (kept, () if compiled.undefined_tangents else graph.outputs[returned:]),
    ]
    changed = {names[each.input_index]: place for place, each in enumerate(program.functional.mutations) if each.data}
    for library, (inputs, outputs) in zip(_libraries(compiled), halves, strict=False):
        for name in library.written:
            message = (
                f"library {library.file!r} writes {name[:80]!r}, which it does not take, or the program not change"
            )
            is_changed = name in changed and name in library.inputs and gradients is None
            where.require(is_changed, message, "target-malformed/library-written")
        written = {changed[name] for name in library.written if name in changed}
        outputs = [output for place, output in enumerate(outputs) if place not in written]
        for name in library.inputs:
            message = f"library {library.file!r} takes {name[:80]!r}, which is no input"
            where.require(name in inputs, message, "target-malformed/library-input")
        for output in filter(lambda each: isinstance(each, str), outputs):
            fits = output not in tensors - inputs - {*library.results}
            message = f"library {library.file!r} does not return {str(output)[:80]!r}"
            where.require(fits, message, "target-malformed/library-result")


def _libraries(program: CompiledProgram) -> list[records.CompiledHalf]:
    return [program.forward] if program.backward is None else [program.forward, program.backward]
