"""Encode or refuse every field of AOTAutograd's metadata, by the table of `schemas/rationale.md`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from aotexport.encode.values import encode_result_meta
from aotexport.torch_internals.functional import FunctionalCapture, tangent_descriptor
from aotexport.torch_internals.names import (
    InputAliasInfo,
    MutationType,
    OpOverload,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    SubclassCreationMeta,
    ViewAndMutationMeta,
)
from aotexport.torch_internals.releases import release
from aotexport.torch_internals.tracing import UNCHECKED, is_of_forward
from aotexport.values.sizes import encode_size
from aotexport_runtime.rewrite.names import CHECK, names_in, operands
from aotexport_runtime.rewrite.partition import ancestors
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import (
    FreshOutput,
    FunctionalGraph,
    Gradients,
    InputAlias,
    InputItself,
    InputMutation,
    IntermediateAlias,
    OutputAlias,
    OutputSpec,
    Partition,
    Tangent,
    ViewStep,
)
from aotexport_runtime.schema.values import SequenceMeta, SizeMeta
from aotexport_runtime.validate.arguments import descendants
from aotexport_runtime.values.structure import encode_constant, is_constant


class Unsupported(Exception):
    """The metadata holds something outside of the calling convention; the message names it."""


def encode_functional(
    captured: FunctionalCapture, graph: Graph, *, file: str, counts: Sequence[int]
) -> FunctionalGraph:
    """Return the calling convention of a functional graph; `Unsupported`: a field of the metadata has no record.

    `graph` is its encoded record, `file` the name of that; `counts` has the number of its inputs per program input.
    """
    metadata = captured.metadata
    firsts = [0, *accumulate(counts)]
    mutations = [
        _mutation(firsts[index], info)
        for index, info in enumerate(metadata.input_info)
        if info.mutation_type is MutationType.MUTATED_OUT_GRAPH
    ]
    results: Any = captured.module.graph.output_node().args[0]
    outputs = tuple(
        _output(info, firsts, value)
        for info, value in zip(metadata.output_info, results[len(mutations) :], strict=False)
    )
    returned = len(mutations) + len(outputs) + metadata.num_intermediate_bases
    joint = any(tangent_descriptor(node) is not None for node in captured.module.graph.find_nodes(op="placeholder"))
    joint = joint or len(graph.outputs) > returned
    if len(graph.outputs) != returned + (len(counts) if joint else 0):
        raise Unsupported(f"a functional graph of {len(graph.outputs)} outputs")
    nodes = [value for value in results[:returned] if isinstance(value, torch.fx.Node)]
    if joint and not all(map(is_of_forward, nodes)):
        raise Unsupported("a backward pass of the model changes what the call returns")
    gradients = _gradients(captured, graph, returned, counts) if joint else None
    required = any(isinstance(output, FreshOutput) and output.requires_grad for output in outputs)
    if gradients is not None and required and all(gradient is None for gradient in gradients.of_inputs):
        raise Unsupported("results require grad through which no gradient flows")
    return FunctionalGraph(
        file=file,
        mutations=tuple(mutations),
        outputs=outputs,
        intermediate_bases=metadata.num_intermediate_bases,
        grad_mode=metadata.grad_enabled_mutation,
        deterministic=metadata.deterministic,
        gradients=gradients,
    )


def refuse_unsupported(metadata: ViewAndMutationMeta) -> None:
    """Refuse metadata that no functional graph of a bundle may have; `Unsupported`: names it."""
    reasons = {
        "effect tokens": metadata.tokens or metadata.num_backward_tokens,
        "asynchronous collective tensors": getattr(metadata, release().asynchronous_inputs),
        "mutation of an input in backward": metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw,
        "functionalised random state": metadata.num_graphsafe_rng_states or metadata.is_rng_op_functionalized,
        "mutations on user streams": any(index is not None for index in metadata.mutated_inp_stream_indices or []),
        "mutations kept in the graph": metadata.keep_input_mutations,
        "results that are tensor subclasses": any(
            not isinstance(meta, PlainTensorMeta)
            for meta in (*metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
        ),
        "gradients of tensor subclasses": any(
            info.requires_grad and not isinstance(meta, PlainTensorMeta)
            for info, meta in zip(metadata.input_info, metadata.subclass_inp_meta, strict=True)
        ),
        "tensor subclasses of dynamic sizes, or of other things than tensors": not all(
            map(_is_plain_inside, metadata.subclass_inp_meta)
        ),
    }
    for reason, present in reasons.items():
        if present:
            raise Unsupported(reason)


def _is_plain_inside(meta: Any) -> bool:
    """Return whether an input is a plain tensor, or consists of plain tensors of static sizes."""
    if isinstance(meta, PlainTensorMeta):
        return True
    if not isinstance(meta, SubclassCreationMeta):
        return False
    static = all(isinstance(size, int) for size in (*meta.outer_size, *meta.outer_stride))
    return static and all(map(_is_plain_inside, meta.attrs.values()))


def _mutation(index: int, info: InputAliasInfo) -> InputMutation:
    if info.mutation_inductor_storage_resize:
        raise Unsupported("resizing the storage of an input")
    hidden = info.mutations_hidden_from_autograd or info.mutations_under_no_grad_or_inference_mode
    return InputMutation(
        input_index=index,
        data=info.mutates_data,
        metadata=info.mutates_metadata,
        storage=info.mutates_storage_metadata,
        under_no_grad=hidden,
        requires_grad=info.requires_grad,
        is_leaf=info.is_leaf,
    )


_FRESH: dict[OutputType, Any] = {
    OutputType.non_alias: None,
    OutputType.unsafe_view_alias: "unsafe",
    OutputType.custom_function_view: "custom_function",
}
"""Kinds of outputs with memory of their own, and which views they are for autograd."""


def _output(info: OutputAliasInfo, firsts: Sequence[int], value: Any) -> OutputSpec:
    kind, base, grad = info.output_type, info.base_idx, info.requires_grad
    if kind in _FRESH:
        several = kind is not OutputType.custom_function_view and grad and is_of_several_views(value)
        return FreshOutput(requires_grad=grad, view="multi_output" if several else _FRESH[kind])
    assert base is not None
    if kind is OutputType.is_input:
        return InputItself(input_index=firsts[base])
    view: Any = {
        "requires_grad": grad,
        "under_no_grad": grad and not info.requires_grad_for_backward,
        "steps": encode_views(info.view_meta_sequence),
    }
    if kind is OutputType.alias_of_input:
        return InputAlias(input_index=firsts[base], **view)
    if kind is OutputType.alias_of_intermediate_base_is_user_output:
        return OutputAlias(output_index=base, **view)
    return IntermediateAlias(base_index=base, **view)


def _gradients(captured: FunctionalCapture, graph: Graph, returned: int, counts: Sequence[int]) -> Gradients:
    inputs = sum(counts)
    placeholders = captured.module.graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if tangent_descriptor(node) is not None]
    if len(placeholders) != inputs + len(tangents):
        raise Unsupported("inputs of a joint graph that are neither the program's nor tangents")
    metadata = captured.metadata
    positions = _tangent_positions(metadata)
    if len(positions) != len(tangents):
        raise Unsupported("tangents that do not match the outputs")
    plain = [meta for meta in metadata.subclass_tangent_meta if isinstance(meta, PlainTensorMeta)]
    records = [
        _tangent(of, index, node.meta["val"], meta)
        for (of, index), node, meta in zip(positions, tangents, plain, strict=True)
    ]
    of_inputs: list[int | None] = []
    detached: list[int] = []
    gradients = graph.outputs[returned:]
    for index, (gradient, info, count) in enumerate(zip(gradients, metadata.input_info, counts, strict=True)):
        if gradient is None and info.requires_grad:
            detached.append(len(of_inputs))
        # Gradients of tensor subclasses are refused; see `refuse_unsupported`.
        of_inputs += [None] * count if gradient is None else [returned + index]
    saved = saved_values(graph, returned, inputs)
    unchecked = _unchecked(captured, graph)
    partition = Partition(name="default", saved=saved, unchecked=tuple(name for name in saved if name in unchecked))
    return Gradients(
        tangents=tuple(records), of_inputs=tuple(of_inputs), detached_inputs=tuple(detached), partitions=(partition,)
    )


def _unchecked(captured: FunctionalCapture, graph: Graph) -> set[str]:
    """Return the values that backward uses without a check of their version.

    Source: torch 2.13, Note [Activations with no version counter checks in eager].
    """
    values = [node for node in captured.module.graph.nodes if node.op in ("placeholder", "call_function")]
    records = (*graph.inputs, *graph.nodes)
    return {record.name for record, node in zip(records, values, strict=True) if node.meta.get(UNCHECKED)}


def _tangent_positions(metadata: ViewAndMutationMeta) -> list[tuple[Any, int]]:
    """Return `(of, index)` per tangent. Source: torch 2.13, `runtime_wrappers.py`, `_codegen_backward_prologue`."""
    written = [info for info in metadata.input_info if info.mutation_type is MutationType.MUTATED_OUT_GRAPH]
    positions: list[tuple[Any, int]] = [
        ("mutation", i) for i, info in enumerate(written) if info.mutates_data and info.requires_grad
    ]
    for index, info in enumerate(metadata.output_info):
        if info.output_type in _FRESH and issubclass(info.raw_type, torch.Tensor) and info.requires_grad_for_backward:
            positions.append(("output", index))
    return positions + [("intermediate_base", index) for index in range(metadata.num_intermediate_bases)]


def _tangent(of: Any, index: int, fake: torch.Tensor, meta: PlainTensorMeta) -> Tangent:
    layout = meta.memory_format
    stride = None if layout is None or layout.stride is None else tuple(encode_size(step) for step in layout.stride)
    memory_format: Any = None
    if stride is None:
        chosen = torch.contiguous_format if layout is None else layout.memory_format or torch.contiguous_format
        memory_format = str(chosen).removeprefix("torch.")
    return Tangent(of=of, index=index, meta=encode_result_meta(fake), stride=stride, memory_format=memory_format)


def saved_values(graph: Graph, returned: int, inputs: int) -> tuple[str, ...]:
    """Return the values that backward and its checks take from forward when nothing is recomputed, in graph order.

    Forward has the nodes that its outputs need, and numbers computed from inputs and such numbers, so that no tensor is
    saved for its sizes alone. Of an operator with several results, the used items are saved.
    """
    forward = {node.name for node in ancestors(graph.nodes, graph.outputs[:returned], frozenset(), frozenset())[0]}
    derived = descendants(graph.nodes, {value.name for value in graph.inputs[inputs:]})
    checks = {node.name for node in graph.nodes if node.op == CHECK and node.name in derived}
    results = graph.outputs[returned:]
    backward = {node.name for node in ancestors(graph.nodes, results, frozenset(), checks)[0]}
    tuples = {node.name for node in graph.nodes if isinstance(node.meta, SequenceMeta)}
    for node in graph.nodes:
        if node.op == "python::getitem" and node.args and node.args[0] in tuples and node.args[0] in forward:
            forward.add(node.name)
    available = forward | {value.name for value in graph.inputs[:inputs]}
    for node in graph.nodes:
        if isinstance(node.meta, SizeMeta) and available.issuperset(operands(node)):
            forward.add(node.name)
            available.add(node.name)
    used = available.intersection(names_in(results))
    for node in graph.nodes:
        if node.name in backward and node.name not in forward:
            used.update(available.intersection(operands(node)))
    in_order = [value.name for value in (*graph.inputs, *graph.nodes)]
    return tuple(name for name in in_order if name in used and name not in tuples)


_HEADER = 3
"""Of `as_tuple()` of a view: `has_symbolic_inputs`, `reapply_views`, `inverse_return_mode`; then come its arguments."""

_VIEWS: dict[str, OpOverload] = {
    **{
        f"{name}_ViewMeta": getattr(torch.ops.aten, name).default
        for name in (
            *("view", "t", "permute", "expand", "squeeze", "unsqueeze", "diagonal", "_conj", "_neg_view", "detach"),
            *("alias", "view_as_real", "view_as_complex", "unfold"),
        )
    },
    "_unsafe_view_ViewMeta": torch.ops.aten.view.default,
    "transpose_int_ViewMeta": torch.ops.aten.transpose.int,
    "squeeze_dim_ViewMeta": torch.ops.aten.squeeze.dim,
    "squeeze_dims_ViewMeta": torch.ops.aten.squeeze.dims,
    "select_int_ViewMeta": torch.ops.aten.select.int,
    "slice_Tensor_ViewMeta": torch.ops.aten.slice.Tensor,
    "view_dtype_ViewMeta": torch.ops.aten.view.dtype,
}
"""Operator per class of view."""


def encode_views(sequence: Any) -> tuple[ViewStep, ...] | None:
    """Return the steps of torch's `ViewMetaSequence`; None: regenerate the view by `as_strided`."""
    steps = [] if sequence is None else [_step(view) for view in sequence.sequence]
    known = tuple(step for step in steps if step is not None)
    return known if known and len(known) == len(steps) else None


def _step(view: Any) -> ViewStep | None:
    op = _VIEWS.get(type(view).__name__)
    if op is None or getattr(view, "has_symbolic_inputs", False):
        return None
    count = sum(not argument.kwarg_only for argument in op._schema.arguments) - 1
    arguments: list[Any] = []
    for value in view.as_tuple()[_HEADER : _HEADER + count]:
        if isinstance(value, tuple | list) and all(type(item) is int for item in value):
            arguments.append(list(value))
        elif is_constant(value):
            arguments.append(encode_constant(value))
        else:
            return None
    return ViewStep(op=f"{op._schema.name}.{op._overloadname}", args=arguments)


def is_of_several_views(value: Any) -> bool:
    """Return whether a value of a graph is one of several views made by one operator, or a view of such a view."""
    while isinstance(value, torch.fx.Node) and value.op == "call_function":
        source = value.args[0] if value.args else None
        if value.target is operator.getitem:
            assert isinstance(source, torch.fx.Node)
            return _returns_views(source)
        if not _returns_views(value):
            return False
        value = source
    return False


def _returns_views(node: torch.fx.Node) -> bool:
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
