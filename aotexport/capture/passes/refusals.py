"""Passes that refuse graphs which a bundle cannot hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from aotexport.capture.effects.hooks import apply_hook
from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.rewrites import differentiable_operators, draws, is_operator, operator_name, subgraphs_of
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import source_of
from aotexport.torch_internals.calls import memory_of, tensors_in
from aotexport.torch_internals.names import OpOverload, statically_known_true
from aotexport_runtime.values.subclasses import is_wrapper


def refuse_hooks_on_state(draft: Draft) -> Draft:
    """Refuse hooks on state."""
    graph = draft.graph.graph
    entries = {node: b.entry for node, b in zip(graph.find_nodes(op="placeholder"), draft.bindings, strict=True)}
    for node in graph.find_nodes(op="call_function", target=apply_hook):
        entry = entries.get(node.args[1])
        if entry is not None:
            raise ExportFailed(
                f"the model registers a hook on its own `{entry.names[0]}` in the call, and every call would add one. "
                "Register it on the loaded module's parameter"
            )
    return draft


def refuse_resized_memory(draft: Draft) -> Draft:
    """Refuse to resize the memory of state, unless it has none yet."""
    placeholders = draft.graph.graph.find_nodes(op="placeholder")
    for node, binding, fake in zip(placeholders, draft.bindings, draft.inputs, strict=True):
        if binding.entry is None or is_wrapper(fake) or fake.layout is not torch.strided:
            continue
        before, after = _extent(fake), node.meta["val"].untyped_storage().nbytes()
        if not statically_known_true(before == 0) and not statically_known_true(after == before):
            cause = _cause(draft.graph, node, before)
            raise ExportFailed(
                f"{_line(cause)}{'a call' if cause is None else f'`{cause.target}`'} changes how much memory "
                f"`{binding.entry.names[0]}` of the model has, which is fixed in a bundle. Assign a new tensor "
                "(`self.name = ...`), or give it its greatest size and write into parts of it"
            )
    return draft


def _cause(graph: torch.fx.GraphModule, placeholder: torch.fx.Node, before: Any) -> torch.fx.Node | None:
    """Return the first operator that writes to the memory of a placeholder and whose result has not room in it."""
    memory = memory_of(placeholder.meta["val"])
    for node in graph.graph.nodes:
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for each in tensors_in(node.meta.get("val")) if writes else ():
            if memory_of(each) == memory and not statically_known_true(_extent(each) <= before):
                return node
    return None


def _extent(tensor: torch.Tensor) -> Any:
    """Return the size in bytes of the memory from its begin to the last element of a tensor."""
    if any(statically_known_true(size == 0) for size in tensor.shape):
        return 0
    last: Any = tensor.storage_offset() + 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        last = last + (size - 1) * step
    return last * tensor.element_size()


def refuse_computed_state(draft: Draft) -> Draft:
    """Refuse state computed before the call, through which eager's gradients flow on to its sources."""
    for binding in draft.bindings:
        entry = binding.entry
        if entry is not None and binding.argument is None and entry.tensor.grad_fn is not None:
            raise ExportFailed(
                f"`{entry.names[0]}` was computed from other tensors before the call ({entry.tensor.grad_fn.name()}), "
                "and gradients would flow on to those. Compute it in the call, or detach it"
            )
    return draft


def refuse_history_by_views(draft: Draft) -> Draft:
    """Refuse to write values that require grad to a tensor of the state if another used one shares its memory."""
    used = [binding.entry for binding in draft.bindings if binding.entry is not None]
    for entry, other in itertools.product(draft.recorded, used):
        if other is not entry and _base(other.tensor) is _base(entry.tensor):
            raise ExportFailed(
                f"the call writes values that require grad to `{entry.names[0]}`, and uses `{other.names[0]}`, which "
                "is a view of the same memory: a bundle keeps no gradients between the two. Keep one of them as a "
                "buffer, and take the other from it in the call"
            )
    return draft


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


# `torch._higher_order_ops`, torch 2.13: their backward runs the forward function once more, without its generator's
# state (`aotexport_runtime/execution/higher_order.py`). `scan` saves the results of its forward.
_DRAWN_ANEW = ("cond", "while_loop", "map_impl")


def refuse_nested_draws(draft: Draft) -> Draft:
    """Refuse gradients through draws of a branch or loop inside of another: torch decides their order in backward."""
    for node in differentiable_operators(draft.graph, draft.inputs):
        inner = next((inner for subgraph in subgraphs_of(draft.graph, node) for inner in _nested(subgraph, node)), None)
        if inner is None:
            continue
        raise ExportFailed(
            f"{_line(node)}`{operator_name(inner)}` inside of `{operator_name(node)}` draws random numbers on the way "
            "to gradients; its backward in torch draws others, in an order that a bundle cannot keep. Draw before it, "
            "and pass the numbers in"
        )
    return draft


def _nested(subgraph: torch.fx.GraphModule, outer: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield drawing operators with subgraphs in `subgraph`, where their backward or that of `outer` draws anew."""
    for node in subgraph.graph.nodes:
        if is_operator(node) and any(map(draws, subgraphs_of(subgraph, node))):
            if not {outer.target.name(), node.target.name()}.isdisjoint(_DRAWN_ANEW):  # type: ignore[union-attr]
                yield node
            for inner in subgraphs_of(subgraph, node):
                yield from _nested(inner, node)


def _line(node: torch.fx.Node | None) -> str:
    line = None if node is None else source_of(node.meta.get("stack_trace"), None)
    return f"{line.file}:{line.line}: in {line.function}: " if line else ""
