"""Rules between a program and its graphs: inputs, outputs, and saved values of partitions."""

from __future__ import annotations

from collections.abc import Sequence

from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph, InputSpec, Partition, Program, SizeInput
from aotexport_runtime.schema.values import Argument, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import descendants, references
from aotexport_runtime.validate.bounds import check_unique
from aotexport_runtime.validate.subclasses import taken_apart


def check_forward_graph(graph: Graph, program: Program, *, where: str) -> None:
    """Refuse a forward graph that does not take the program's inputs and return its outputs.

    Raises:
        BundleInvalid: names the fault.
    """
    _check_inputs(graph, program, [], where)
    if len(graph.outputs) != len(program.outputs):
        raise BundleInvalid(f"{len(graph.outputs)} outputs for the program's {len(program.outputs)}", where=where)


def check_functional_graph(graph: Graph, program: Program, functional: FunctionalGraph, *, where: str) -> None:
    """Refuse a joint or inference graph that breaks its calling convention.

    Raises:
        BundleInvalid: names the fault.
    """
    program = taken_apart(program)
    gradients = functional.gradients
    _check_inputs(graph, program, [] if gradients is None else [tangent.meta for tangent in gradients.tangents], where)
    effect = next((node.op for node in graph.nodes if node.op.startswith("torch::")), None)
    if effect is not None:
        raise BundleInvalid(f"`{effect}` changes the state of the interpreter; a functional graph may not", where=where)
    returned = len(functional.mutations) + len(functional.outputs) + functional.intermediate_bases
    if len(graph.outputs) < returned or (gradients is None and len(graph.outputs) > returned):
        raise BundleInvalid(f"{len(graph.outputs)} outputs; the calling convention has {returned}", where=where)
    _check_tensors_returned(graph.outputs[:returned], functional, where)
    if gradients is None:
        return
    for index in gradients.of_inputs:
        if index is not None and not returned <= index < len(graph.outputs):
            raise BundleInvalid(
                f"gradient {index} is not among the outputs {returned} to {len(graph.outputs) - 1}", where=where
            )
    names = [graph_input.name for graph_input in graph.inputs]
    late = descendants(graph.nodes, set(names[len(program.inputs) :]))
    early = {name for argument in graph.outputs[:returned] for name in references(argument)}
    if not early.isdisjoint(late):
        raise BundleInvalid("an output of the forward needs an incoming gradient", where=where)
    values = {*names, *(node.name for node in graph.nodes)}
    for partition in gradients.partitions:
        _check_partition(partition, values, late, where)


def _check_inputs(graph: Graph, program: Program, tangents: Sequence[TensorMeta], where: str) -> None:
    expected = len(program.inputs) + len(tangents)
    if len(graph.inputs) != expected:
        raise BundleInvalid(f"{len(graph.inputs)} inputs; the program passes {expected}", where=where)
    metas = [*map(_meta_of, program.inputs), *tangents]
    for index, (graph_input, meta) in enumerate(zip(graph.inputs, metas, strict=True)):
        if not _is_same(graph_input.meta, meta):
            raise BundleInvalid(f"input {index} of the graph is not what the program passes", where=where)


def _meta_of(spec: InputSpec) -> ValueMeta:
    return SizeMeta() if isinstance(spec, SizeInput) else spec.meta


def _is_same(meta: ValueMeta, other: ValueMeta) -> bool:
    if isinstance(meta, TensorMeta) and isinstance(other, TensorMeta):
        return (meta.dtype, meta.shape) == (other.dtype, other.shape)
    return isinstance(meta, SizeMeta) and isinstance(other, SizeMeta)


def _check_tensors_returned(outputs: Sequence[Argument], functional: FunctionalGraph, where: str) -> None:
    """Refuse constants where an epilogue needs a tensor: mutated values, aliases and bases."""
    mutations = len(functional.mutations)
    for index, output in enumerate(outputs):
        place = index - mutations
        fresh = 0 <= place < len(functional.outputs) and isinstance(functional.outputs[place], FreshOutput)
        if not fresh and not isinstance(output, str):
            raise BundleInvalid(f"output {index} of the graph is no value", where=where)


def _check_partition(partition: Partition, values: set[str], late: set[str], where: str) -> None:
    check_unique(partition.saved, "saved value", where)
    for name in partition.saved:
        if name not in values:
            raise BundleInvalid(f"saved value {name[:80]!r} is not in the graph", where=where)
        if name in late:
            raise BundleInvalid(f"saved value {name[:80]!r} needs an incoming gradient", where=where)
    for name in partition.unchecked:
        if name not in partition.saved:
            raise BundleInvalid(f"unchecked value {name[:80]!r} is not saved", where=where)
