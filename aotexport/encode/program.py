"""Encode a captured program as its record and graphs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aotexport.capture.functional.capture import Refused
from aotexport.capture.trace.autocast import example_autocast
from aotexport.capture.trace.forward_capture import Answer, Binding, ForwardCapture
from aotexport.capture.trace.key_order import with_any_order
from aotexport.capture.trace.shapes import assumptions, dimensions, guards
from aotexport.encode.functional import Unsupported, encode_functional, refuse_unsupported
from aotexport.encode.graph import GraphEncoder, with_calls
from aotexport.encode.notes import size_lines, trace_notes
from aotexport.encode.values import encode_result_meta, encode_tensor_meta
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall, with_leaves
from aotexport.model.programs import ProgramSpec
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport.values.subclasses import encode_subclass, part_names
from aotexport_runtime.allowed.operators import LAUNCH
from aotexport_runtime.rewrite.names import names_in, operands
from aotexport_runtime.schema.graph import Graph, Node, SourceLine
from aotexport_runtime.schema.program import (
    ArgumentInput,
    ForwardGraph,
    FunctionalGraph,
    Gradients,
    InputMutation,
    InputSpec,
    Program,
    Question,
    Rebind,
    Refusal,
    SizeInput,
    StateInput,
)
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate.arguments import descendants, graphs_of
from aotexport_runtime.values.subclasses import parts

FORWARD_FILE = "forward.json"


@dataclass(frozen=True)
class EncodedProgram:
    """A program's record with its graphs, by file name.

    Attributes:
        notes: sentences for the user about effects that the bundle does not reproduce.
        lowered: its form for NVIDIA GPUs, with a `record` and `graphs` by file name; None: it has none.
        compiled: names of the targets for which it was compiled to libraries.
        casts: the program of the model in another dtype, by its name, with a forward graph alone.
        size_lines: the user's line that narrowed the range of a symbol, by its name.
        outside: what the model does at the sizes 0 and 1 that the range of a symbol leaves out, by its name.
        optimizer: of a whole training step, what the bundle says of its optimizer; None: it is another program.
    """

    record: Program
    graphs: dict[str, Graph]
    notes: tuple[str, ...] = ()
    variant_of: str | None = None
    lowered: Any = None
    compiled: tuple[str, ...] = ()
    casts: dict[str, EncodedProgram] = field(default_factory=dict)
    size_lines: dict[str, SourceLine] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None

    @property
    def launched(self) -> list[str]:
        """Names of the Triton kernels that the model launches itself."""
        nodes = (node for graph in graphs_of(self.graphs[FORWARD_FILE]) for node in graph.nodes)
        launches: Any = (node.args[0] for node in nodes if node.op == LAUNCH)
        return list(dict.fromkeys(kernel.value for kernel in launches))

    def without_functional(self, reason: str) -> EncodedProgram:
        """Return the program without its functional graph, which `reason` rules out."""
        assert self.record.functional is not None
        graph: Any = "joint" if self.record.functional.gradients is not None else "inference"
        refusals = (*self.record.refusals, Refusal(graph=graph, reason=reason))
        record = msgspec.structs.replace(self.record, functional=None, refusals=refusals)
        graphs = {FORWARD_FILE: self.graphs[FORWARD_FILE]}
        return dataclasses.replace(self, record=record, graphs=graphs, lowered=None)


def encode_program(spec: ProgramSpec, forward: ForwardCapture, *, root: Path | None, strip: bool) -> EncodedProgram:
    """Return a captured program with its forward graph; `strip` leaves out provenance.

    Must run before the functional graph is captured: that may fix sizes which the forward graph leaves open.
    """
    call = spec.call
    names = [_input_name(binding, call) for binding in forward.bindings]
    encoder = GraphEncoder(forward.graph, names, root, strip)
    graph = encoder.encode()
    if not strip:
        graph = with_calls(graph, forward, encoder.names)
    known = dimensions(forward, call.paths)
    positions = {b.argument: index for index, b in enumerate(forward.bindings) if b.argument is not None}

    def reindexed(leaf: Leaf) -> Leaf:
        return msgspec.structs.replace(leaf, index=positions[leaf.index])

    values = [
        value.meta.get("val") if isinstance(value, torch.fx.Node) else value
        for value in forward.graph.graph.output_node().args[0]  # type: ignore[union-attr]
    ]
    program = Program(
        name=spec.name,
        mode=spec.mode,
        grad=spec.grad,
        method=spec.method,
        parameters=tuple(
            with_any_order(
                msgspec.structs.replace(parameter, tree=with_leaves(parameter.tree, reindexed)), forward.any_order
            )
            for parameter in call.parameters
        ),
        inputs=tuple(_input(b, fake, call) for b, fake in zip(forward.bindings, forward.inputs, strict=True)),
        outputs=tuple(encode_result_meta(v) if isinstance(v, torch.Tensor) else None for v in values),
        output_tree=forward.function.output_tree,
        rebinds=tuple(Rebind(name=entry.names[0], output_index=index) for entry, index in forward.function.rebinds),
        container_changes=tuple(forward.function.container_changes),
        dimensions=known,
        guards=guards(forward, known),
        fixed=tuple(sorted(forward.effects.reads)),
        autocast=example_autocast(call),
        differentiated=tuple(index for index, b in enumerate(forward.bindings) if b.is_differentiated),
        questions=_questions(forward.bindings),
        forward=ForwardGraph(file=FORWARD_FILE, differentiable=not forward.effects.autograd_functions),
        notes=trace_notes(call, forward, known, root, strip=strip),
    )
    notes, lines = tuple(forward.effects.notes), size_lines(forward, root, strip=strip)
    return EncodedProgram(program, {FORWARD_FILE: graph}, notes, spec.variant_of, size_lines=lines)


def _questions(bindings: Sequence[Binding]) -> tuple[Question, ...]:
    inputs: dict[Answer, list[int]] = {}
    for index, binding in enumerate(bindings):
        for answer in binding.answers:
            inputs.setdefault(answer, []).append(index)
    found = [
        Question(inputs=tuple(indices), requires_grad=answer.requires_grad, recording=answer.recording)
        for answer, indices in inputs.items()
    ]
    return tuple(dict.fromkeys(found))


def with_functional(
    program: EncodedProgram,
    forward: ForwardCapture,
    functional: FunctionalCapture | Refused,
    *,
    root: Path | None,
    strip: bool,
) -> EncodedProgram:
    """Return the program of a capture with its functional graph, or with the reason why it has none."""
    kind: Any = "joint" if program.record.grad else "inference"
    try:
        if isinstance(functional, Refused):
            raise Unsupported(functional.reason)
        refuse_unsupported(functional.metadata)
        graph = _functional_graph(program, forward, functional, root, strip)
        _refuse_fixed_sizes(program, graph)
        record = encode_functional(functional, graph, file=f"{kind}.json", counts=counts_of_parts(program.record))
        if _records_otherwise(program, record):
            raise Unsupported("a part of the model switches gradients on, also for calls that record none")
        if record.gradients is not None and program.record.forward.differentiable:
            _refuse_visible_mutations(program.record, record.gradients, record.mutations, graph)
        if record.gradients is not None:
            _refuse_constant_gradients(graph, record.gradients)
        dimensions = program.record.dimensions
        assumed = (*guards(forward, dimensions), *assumptions(forward, dimensions))
    except (Unsupported, ExportFailed) as error:
        refusals = (*program.record.refusals, Refusal(graph=kind, reason=str(error)))
        return dataclasses.replace(program, record=msgspec.structs.replace(program.record, refusals=refusals))
    extra = tuple(guard for guard in dict.fromkeys(assumed) if guard not in program.record.guards)
    record = msgspec.structs.replace(record, guards=extra)
    return dataclasses.replace(
        program,
        record=msgspec.structs.replace(program.record, functional=record),
        graphs={**program.graphs, record.file: graph},
    )


def _records_otherwise(program: EncodedProgram, functional: FunctionalGraph) -> bool:
    """Return whether a functional graph records other gradients than the forward graph in some grad mode."""
    if functional.gradients is None:
        nodes = program.graphs[FORWARD_FILE].nodes
        return any(node.op == "torch::set_grad_enabled" and node.args == [True] for node in nodes)
    # It has the gradients that the model's regions record where the caller's mode records none.
    return not program.record.grad


def _refuse_fixed_sizes(program: EncodedProgram, graph: Graph) -> None:
    """Refuse a functional graph whose trace fixed a size that the forward graph leaves open."""
    shapes = {value.name: value.meta for value in program.graphs[FORWARD_FILE].inputs}
    for value in graph.inputs:
        meta = shapes.get(value.name)
        if isinstance(meta, TensorMeta) and isinstance(value.meta, TensorMeta) and meta.shape != value.meta.shape:
            raise Unsupported(f"it works only for the example's size of `{value.name}`, {list(value.meta.shape)}")


def _refuse_visible_mutations(
    program: Program, gradients: Gradients, mutations: Sequence[InputMutation], graph: Graph
) -> None:
    """Refuse changes of inputs that autograd records: only eager gives gradients of the changed tensor."""
    required = [
        not isinstance(spec, SizeInput) and spec.meta.requires_grad
        for spec, count in zip(program.inputs, counts_of_parts(program), strict=True)
        for _ in range(count)
    ]
    for tangent in gradients.tangents:
        if tangent.of != "mutation":
            continue
        mutation = mutations[tangent.index]
        # A leaf that requires grad can only change unseen by autograd.
        if not (mutation.under_no_grad or (mutation.is_leaf and required[mutation.input_index])):
            name = graph.inputs[mutation.input_index].name
            raise Unsupported(f"gradients flow through `{name}`, which the call changes")


def _refuse_constant_gradients(graph: Graph, gradients: Gradients) -> None:
    """Refuse a joint graph with a gradient that depends on no output's: it does not tell for which outputs it is."""
    name = constant_gradient(graph, gradients)
    if name is not None:
        node = next((node for node in graph.nodes if node.name == name), None)
        term = f"`{name}`" if node is None else f"`{name}` (`{node.op}`)"
        raise Unsupported(
            f"{term} is part of a gradient whatever those of the outputs are, and the joint graph does not say with "
            "which outputs it comes"
        )


def _functional_graph(
    program: EncodedProgram, forward: ForwardCapture, functional: FunctionalCapture, root: Path | None, strip: bool
) -> Graph:
    names: list[str] = []
    by_tensor: dict[int, str] = {}
    inputs = zip(forward.bindings, program.record.inputs, program.graphs[FORWARD_FILE].inputs, strict=True)
    for binding, spec, value in inputs:
        names += part_names(value.name, getattr(spec, "subclass", None))
        if binding.entry is not None:
            by_tensor[id(binding.entry.tensor)] = value.name
    tangents = len(functional.module.graph.find_nodes(op="placeholder")) - len(names)
    encoder = GraphEncoder(
        functional.module,
        [*names, *(f"tangent:{index}" for index in range(tangents))],
        root,
        strip,
        {node.name: node for node in forward.graph.graph.nodes},
        lambda tensor: by_tensor.get(id(tensor)),
    )
    return encoder.encode()


def counts_of_parts(program: Program) -> list[int]:
    """Return the number of plain tensors that each input is made of."""
    return [len(part_names("", getattr(spec, "subclass", None))) for spec in program.inputs]


def _input_name(binding: Binding, call: ExampleCall) -> str:
    if binding.entry is not None:
        return f"{binding.entry.role}:{binding.entry.names[0]}"
    assert binding.argument is not None
    return f"input:{call.paths[binding.argument]}"


def _input(binding: Binding, fake: Any, call: ExampleCall) -> InputSpec:
    if isinstance(fake, torch.SymInt):
        assert binding.argument is not None
        return SizeInput(path=call.paths[binding.argument], symbol=fake.node._expr.name)
    meta: TensorMeta = encode_tensor_meta(fake)
    subclass = encode_subclass(fake, _input_name(binding, call))
    of = () if subclass is None else tuple(map(encode_tensor_meta, parts(fake)))
    if binding.entry is not None:
        return StateInput(name=binding.entry.names[0], meta=meta, subclass=subclass, parts=of)
    assert binding.argument is not None
    path = call.paths[binding.argument]
    return ArgumentInput(path=path, meta=meta, is_leaf=fake.is_leaf, subclass=subclass, parts=of)


_SUMS = frozenset(
    f"aten::{name}"
    for name in ("add.Tensor", "sub.Tensor", "addmm.default", "addmv.default", "baddbmm.default", "addcmul.default")
)
"""Operators that add to their first operand."""

_PLACES = frozenset(
    f"aten::{name}"
    for name in (
        *("cat.default", "stack.default", "where.self", "index_put.default", "index_add.default", "scatter.src"),
        *("scatter_add.default", "slice_scatter.default", "select_scatter.default", "as_strided_scatter.default"),
    )
)
"""Operators that place operands beside each other: zeros among these are places that a gradient does not reach."""

_BOTH = re.compile(r"aten::(add|sub)\.Tensor|aten::(slice|select|as_strided)_scatter\.default")
"""Those among them that take two operands so."""

_ZEROS = frozenset(f"aten::{name}" for name in ("zeros.default", "zeros_like.default", "new_zeros.default"))
_FILLED = frozenset(f"aten::{name}" for name in ("full.default", "full_like.default", "new_full.default"))


def constant_gradient(graph: Graph, gradients: Gradients) -> str | None:
    """Return the value in a joint graph that is a gradient, or a term of one, and depends on no tangent, if any.

    Eager's backward pass from some outputs visits only the operators before those; the tangents that a term is computed
    from tell its outputs. A term computed from none would be added in every pass; of one tangent, every pass has it.
    """
    if len(gradients.tangents) < 2:
        return None
    tangents = {value.name for value in graph.inputs[len(gradients.of_inputs) :]}
    derived, zeros = descendants(graph.nodes, tangents), _zeros(graph.nodes)
    floating = {
        value.name
        for value in (*graph.inputs, *graph.nodes)
        if isinstance(value.meta, TensorMeta) and value.meta.dtype.startswith(("float", "bfloat", "complex"))
    }
    for node in graph.nodes:
        if node.name not in derived or node.name not in floating or node.op not in _SUMS | _PLACES:
            continue
        for name in _terms(node):
            if name in floating - derived and not (node.op in _PLACES and name in zeros):
                return name
    ends = (graph.outputs[index] for index in gradients.of_inputs if index is not None)
    return next((end for end in ends if isinstance(end, str) and end not in derived), None)


def _terms(node: Node) -> list[str]:
    """Return the operands that a node of `_SUMS` or `_PLACES` adds or places unchanged."""
    taken = node.args[1:] if node.op == "aten::where.self" else node.args[: 2 if _BOTH.fullmatch(node.op) else 1]
    return names_in(taken)


def _zeros(nodes: Sequence[Node]) -> set[str]:
    """Return the values that are zeros in every call: made as zeros, or computed from zeros alone."""
    found: set[str] = set()
    for node in nodes:
        made = node.op in _ZEROS or (node.op in _FILLED and node.args[1] == 0)
        made = made or (node.op == "aten::scalar_tensor.default" and node.args[0] == 0)
        if made or (operands(node) and found.issuperset(operands(node))):
            found.add(node.name)
    return found
