"""Find the branches and loops that gradients go through, and the ones that draw random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.capture.passes.subgraphs import is_operator, subgraphs_of
from aotexport.torch_internals.names import OpOverload


def operator_name(node: torch.fx.Node) -> str:
    """Return the user's name of the higher-order operator that a node calls."""
    return node.target.name().removesuffix("_impl")  # type: ignore[union-attr]


def draws(subgraph: torch.fx.GraphModule) -> bool:
    """Return whether a graph, or one of its subgraphs, draws random numbers."""
    return any(
        (isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)
        or any(map(draws, subgraphs_of(subgraph, node)))
        for node in subgraph.graph.nodes
    )


def differentiable_operators(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[torch.fx.Node]:
    """Return the higher-order operators that gradients go through.

    Args:
        graph: a forward graph of a program that records gradients.
        inputs: one value per placeholder.
    """
    return [node for node in _differentiable(graph, inputs) if is_operator(node)]


def _differentiable(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[torch.fx.Node, None]:
    """Return the nodes computed from inputs that require grad, other than through `detach`, in order."""
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
