"""Gradients of branches and loops: which nodes they go through, and what draws random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.capture.passes.subgraphs import is_operator, subgraphs_of
from aotexport.torch_internals.names import OpOverload


def operator_name(node: torch.fx.Node) -> str:
    """Return the name by which users call the operator with subgraphs that a node calls."""
    return node.target.name().removesuffix("_impl")  # type: ignore[union-attr]


def draws(subgraph: torch.fx.GraphModule) -> bool:
    """Return whether a graph, or what it runs, draws random numbers."""
    return any(
        (isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)
        or any(map(draws, subgraphs_of(subgraph, node)))
        for node in subgraph.graph.nodes
    )


def differentiable_operators(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[torch.fx.Node]:
    """Return the operators with subgraphs that gradients go through.

    Args:
        graph: a forward graph of a program that records gradients.
        inputs: what its placeholders stand for.
    """
    return [node for node in _differentiable(graph, inputs) if is_operator(node)]


def _differentiable(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[torch.fx.Node, None]:
    """Return the nodes that are computed from inputs that need gradients, not through `detach`, in order."""
    found: dict[torch.fx.Node, None] = {}
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            found[node] = None
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.detach.default and any(
            operand in found for operand in node.all_input_nodes
        ):
            found[node] = None
    return found
