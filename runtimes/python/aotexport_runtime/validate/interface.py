"""Rules between a program and its graphs: inputs, outputs, and saved values of partitions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.gradients import Gradients
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph, InputSpec, Program, SizeInput
from aotexport_runtime.schema.values import Argument, NothingMeta, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import descendants, described, described_argument, metas_of, references
from aotexport_runtime.validate.trees import taken_apart


def check_forward_graph(graph: Graph, program: Program, *, where: Place) -> None:
    """Refuse a forward graph that does not take the program's inputs and return its outputs."""
    _check_inputs(graph, program, [], where)
    if len(graph.outputs) != len(program.outputs):
        message = f"{len(graph.outputs)} outputs for the program's {len(program.outputs)}"
        where.at("outputs").refuse(message, "graph-interface/outputs")
    _check_results(graph, graph.outputs, program.outputs, where, ())


def check_functional_graph(
    graph: Graph, program: Program, functional: FunctionalGraph, *, where: Place, record: str
) -> None:
    """Refuse a joint or inference graph that breaks the calling convention of a checked program of file `record`."""
    program, gradients = taken_apart(program), functional.gradients
    _check_inputs(graph, program, [] if gradients is None else [tangent.meta for tangent in gradients.tangents], where)
    for index, node in enumerate(graph.nodes):
        if node.op.startswith("torch::"):
            message = f"`{node.op}` changes the state of the interpreter; a functional graph may not"
            where.at("nodes", index, "op").refuse(message, "operator-unlisted/functional")
    returned = returned_count(functional)
    if len(graph.outputs) < returned or (gradients is None and len(graph.outputs) > returned):
        message = f"{len(graph.outputs)} outputs; the calling convention has {returned}"
        where.at("outputs").refuse(message, "graph-interface/outputs")
        return
    faults, mutations = where.found, len(functional.mutations)
    # An epilogue needs tensors in the place of mutated values, aliases and bases.
    fresh = {index for index, each in enumerate(functional.outputs, mutations) if isinstance(each, FreshOutput)}
    for index, output in enumerate(graph.outputs[:returned]):
        if index not in fresh and not isinstance(output, str):
            where.at("outputs", index).refuse(f"output {index} of the graph is no value", "graph-interface/value")
    if where.found == faults:
        changed = [_meta_of(program.inputs[each.input_index]) for each in functional.mutations]
        # These may get other axes, and a storage of another dtype.
        anew = {index for index, each in enumerate(functional.mutations) if each.metadata or each.storage}
        outputs = graph.outputs[: mutations + len(program.outputs)]
        _check_results(graph, outputs, [*changed, *program.outputs], where, anew)
    if gradients is not None and where.found == faults:
        said = Place(record).at("functional", "gradients")
        _check_tangents(graph, functional, gradients, said)
        _check_gradients(graph, program, gradients, returned, where, said)


def returned_count(functional: FunctionalGraph) -> int:
    """Return how many values a functional graph returns before gradients."""
    return len(functional.mutations) + len(functional.outputs) + functional.intermediate_bases


def _check_tangents(graph: Graph, functional: FunctionalGraph, gradients: Gradients, said: Place) -> None:
    """Refuse tangents of another type than the value that they are gradients of."""
    metas, mutations = metas_of(graph), len(functional.mutations)
    first = {"mutation": 0, "output": mutations, "intermediate_base": mutations + len(functional.outputs)}
    for index, tangent in enumerate(gradients.tangents):
        value = graph.outputs[first[tangent.of] + tangent.index]
        of = described(metas.get(value) if isinstance(value, str) else None)
        if tangent.of == "output" and not isinstance(functional.outputs[tangent.index], FreshOutput):
            of = "what is no new tensor"
        if described(tangent.meta) != of:
            message = f"a tangent is {described(tangent.meta)}, and belongs to {of}"
            said.at("tangents", index).refuse(message, "program-malformed/tangent-value")


def _check_gradients(
    graph: Graph, program: Program, gradients: Gradients, returned: int, where: Place, said: Place
) -> None:
    """Refuse gradients of another type than their input, and partitions that the graph does not have."""
    metas = metas_of(graph)
    for index, gradient in enumerate(gradients.of_inputs):
        if gradient is None:
            continue
        if not returned <= gradient < len(graph.outputs):
            message = f"gradient {gradient} is not among the outputs {returned} to {len(graph.outputs) - 1}"
            said.at("of_inputs", index).refuse(message, "index-range/gradient")
        output = graph.outputs[gradient] if gradient < len(graph.outputs) else None
        found = metas.get(output) if isinstance(output, str) else None
        of = described(_meta_of(program.inputs[index]))
        if output is not None and not isinstance(found, NothingMeta) and described(found) != of:
            message = f"the gradient of input {index} is {described(found)}, and the input {of}"
            where.at("outputs", gradient).refuse(message, "result-type/gradient")
    late = descendants(graph.nodes, {each.name for each in graph.inputs[len(program.inputs) :]})
    for index, argument in enumerate(graph.outputs[:returned]):
        if not late.isdisjoint(references(argument)):
            message = "an output of the forward needs an incoming gradient"
            where.at("outputs", index).refuse(message, "partition-malformed/forward")
    for index, partition in enumerate(gradients.partitions):
        for position, name in enumerate(partition.saved):
            if name not in metas or name in late:
                reason = "is not in the graph" if name not in metas else "needs an incoming gradient"
                place = said.at("partitions", index, "saved", position)
                place.refuse(f"saved value {name[:80]!r} {reason}", "partition-malformed/saved")


def _check_results(
    graph: Graph, outputs: Sequence[Argument], said: Sequence[ValueMeta | None], where: Place, anew: Collection[int]
) -> None:
    """Refuse outputs whose metadata are not what the program says (None: a number). `anew`: may be any tensors."""
    metas = metas_of(graph)
    for index, (output, expected) in enumerate(zip(outputs, said, strict=False)):
        found = described_argument(output, metas)
        found = "a number" if found in ("an integer", "a float") else found
        required = "a number" if expected is None else described(expected)
        is_free = found is None or (index in anew and found.startswith("a tensor"))
        if found != required and not is_free:
            message = f"output {index} of the graph is {found}, and the program says {required}"
            where.at("outputs", index).refuse(message, "result-type/output")


def _check_inputs(graph: Graph, program: Program, tangents: Sequence[TensorMeta], where: Place) -> None:
    metas = [*map(_meta_of, program.inputs), *tangents]
    if len(graph.inputs) != len(metas):
        message = f"{len(graph.inputs)} inputs; the program passes {len(metas)}"
        where.at("inputs").refuse(message, "graph-interface/inputs")
    for index, (graph_input, meta) in enumerate(zip(graph.inputs, metas, strict=False)):
        found = graph_input.meta
        is_same = isinstance(meta, SizeMeta) and isinstance(found, SizeMeta)
        if isinstance(meta, TensorMeta) and isinstance(found, TensorMeta):
            is_same = (found.dtype, found.shape) == (meta.dtype, meta.shape)
        if not is_same:
            message = f"input {index} of the graph is not what the program passes"
            where.at("inputs", index).refuse(message, "graph-interface/input")


def _meta_of(spec: InputSpec) -> ValueMeta:
    return SizeMeta() if isinstance(spec, SizeInput) else spec.meta
