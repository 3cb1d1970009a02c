"""Rules of lowered programs: their graphs keep the calling convention, and launch existing kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.kernels import Kernel, NumberParameter
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import LoweredProgram
from aotexport_runtime.schema.values import NothingMeta, SizeArgument, TensorMeta, ValueMeta
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_graph
from aotexport_runtime.validate.subclasses import taken_apart

KERNEL = "kernel::"


def check_lowered(lowered: LoweredProgram, program: Program, *, where: Place) -> None:
    """Refuse the record of a lowered program that does not fit its program.

    Raises:
        BundleInvalid: names the fault.
    """
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

    Raises:
        BundleInvalid: names the fault.
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
