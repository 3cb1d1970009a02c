"""A second trace, for models that ask whether gradients are on: most ask something else besides, and do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import map_arg

from aotexport.capture.effects.checkpoints import is_mark


def same_in_both_modes(graph: torch.fx.GraphModule, trace_other: Callable[[], torch.fx.GraphModule]) -> bool:
    """Return whether the model does the same where the answer is the other one.

    Args:
        graph: the trace with one answer.
        trace_other: traces the model with the other.
    """
    # Numbers that only the data know get new names in every trace, and new checks with them.
    if any(node.meta.get("unbacked_bindings") for node in graph.graph.nodes):
        return False
    try:
        return _same(graph, trace_other())
    except Exception:
        # What cannot be traced with the other answer is not the same, and calls are held to the one.
        return False


def _same(one: torch.fx.GraphModule, other: torch.fx.GraphModule) -> bool:
    # Without gradients a checkpoint does nothing.
    nodes = [[node for node in graph.graph.nodes if not is_mark(node)] for graph in (one, other)]
    if len(nodes[0]) != len(nodes[1]):
        return False
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    for node, twin in zip(*nodes, strict=True):
        if node.op != twin.op:
            return False
        if node.op == "get_attr":
            if not _same_attribute(getattr(one, node.target, None), getattr(other, twin.target, None)):
                return False
        elif node.target != twin.target:
            return False
        if map_arg((node.args, node.kwargs), twins.__getitem__) != (twin.args, twin.kwargs):
            return False
        twins[node] = twin
    return True


def _same_attribute(one: Any, other: Any) -> bool:
    if isinstance(one, torch.fx.GraphModule) and isinstance(other, torch.fx.GraphModule):
        return _same(one, other)
    return one is not None and one is other
