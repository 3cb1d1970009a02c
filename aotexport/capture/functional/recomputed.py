"""Checkpointed parts of joint graphs: backward recomputes their values from the part's inputs.

A value of such a part that the part's own backward reads gets a twin, computed in backward at its first use. Other
readers use the saved value, as in eager. Random numbers are saved, not drawn again.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from aotexport.capture.effects.checkpoints import ARGUMENT, PART
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport.torch_internals.tracing import UNCHECKED, is_of_backward

aten: Any = torch.ops.aten

_DRAWS_FOR_SHAPES = frozenset(
    (
        *("bernoulli.p", "cauchy.default", "exponential.default", "geometric.default", "log_normal.default"),
        *("normal.float_float", "normal_functional.default", "rand.default", "rand_like.default"),
        *("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype", "randn.default"),
        *("randn_like.default", "randperm.default", "random.default", "random.from", "random.to", "uniform.default"),
    )
)
"""Random operators that read no values of tensors."""


class _DrawsFromValues(Exception):
    """Backward would draw from probabilities that it recomputes."""


def recompute_checkpoints(captured: FunctionalCapture) -> str | None:
    """Let the backward of a joint graph recompute the values of checkpointed parts.

    Returns:
        Why the graph cannot do the same as eager; None: it does.
    """
    graph = captured.module.graph
    if not any(_part(node) for node in graph.nodes):
        return None
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    readers: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        part = _part(node)
        if part is None:
            continue
        if is_of_backward(node):
            try:
                node.args, node.kwargs = _renewed(node, (node.args, node.kwargs), node, twins)
            except _DrawsFromValues:
                return "a checkpointed part draws random numbers that depend on what it computes"
            readers.add(node)
        elif not part[1] and _draws(node):
            return "a checkpointed part draws other random numbers in backward than in the call"
    readers.update(twins.values())
    read = {operand for node in readers for operand in node.all_input_nodes} - readers
    if not read.isdisjoint(_changed(captured)):
        return "a checkpointed part reads what the call changes"
    for node in read:
        is_read_elsewhere = any(is_of_backward(user) and user not in readers for user in node.users)
        if not is_read_elsewhere and ARGUMENT not in node.meta:
            node.meta[UNCHECKED] = True
    captured.module.recompile()
    return None


def _part(node: Any) -> tuple[int, bool] | None:
    """Return the checkpointed part of a node, and whether it draws the same random numbers again."""
    return (node.meta.get("custom") or {}).get(PART)


def _renewed(reader: torch.fx.Node, arguments: Any, first: torch.fx.Node, twins: dict[Any, torch.fx.Node]) -> Any:
    """Return arguments of `reader`, values of its part replaced by their twins, which are placed before `first`."""

    def twin(node: torch.fx.Node) -> torch.fx.Node:
        if node not in twins and _part(node) == _part(reader) and not is_of_backward(node):
            made = _twin(node, first, twins)
            if made is not node:
                twins[node] = made
        return twins.get(node, node)

    return torch.fx.map_arg(arguments, twin)


def _twin(node: Any, first: torch.fx.Node, twins: dict[Any, torch.fx.Node]) -> torch.fx.Node:
    graph = node.graph
    if node.op != "call_function" or (_draws(node) and node.target.__name__ in _DRAWS_FOR_SHAPES):
        return node
    if node.target is operator.getitem and node.args[0].target is aten.native_dropout.default:
        drawn, index = node.args
        return _dropped_again(node, drawn, first, twins) if index == 0 else node
    if _draws(node):
        raise _DrawsFromValues
    args, kwargs = _renewed(node, (node.args, node.kwargs), first, twins)
    with graph.inserting_before(first):
        made = graph.create_node(node.op, node.target, args, kwargs, name=f"{node.name}_again")
    made.meta = _of_backward(node)
    return made


def _dropped_again(
    node: torch.fx.Node, drawn: Any, first: torch.fx.Node, twins: dict[Any, torch.fx.Node]
) -> torch.fx.Node:
    """Apply the recorded mask of a dropout to its recomputed input.

    Source: torch 2.13, aten/src/ATen/native/Dropout.cpp, `native_dropout_cpu`.
    """
    graph = node.graph
    tensor, p, _ = _renewed(node, drawn.args, first, twins)
    mask = next((user for user in drawn.users if user.target is operator.getitem and user.args[1] == 1), None)
    if mask is None:
        with graph.inserting_after(drawn):
            mask = graph.call_function(operator.getitem, (drawn, 1))
        mask.meta = {**drawn.meta, "val": drawn.meta["val"][1]}
    with graph.inserting_before(first):
        masked = graph.call_function(aten.mul.Tensor, (tensor, mask))
        scaled = graph.call_function(aten.mul.Tensor, (masked, 1 / (1 - p) if p != 1 else 0.0))
    masked.meta, scaled.meta = _of_backward(node), _of_backward(node)
    return scaled


def _of_backward(node: torch.fx.Node) -> dict[str, Any]:
    return {**node.meta, "partitioner_tag": "is_backward"}


def _draws(node: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _changed(captured: FunctionalCapture) -> set[torch.fx.Node]:
    """Return the inputs of a joint graph that a call changes, or all of them if that is not known."""
    inputs = captured.module.graph.find_nodes(op="placeholder")
    changes = [info.mutates_data or info.mutates_metadata for info in captured.metadata.input_info]
    plain = [node for node in inputs if not is_of_backward(node)]
    if len(plain) != len(changes):
        return set(inputs) if any(changes) else set()
    return {node for node, is_changed in zip(plain, changes, strict=True) if is_changed}
