"""Higher-order operators in a forward graph, and their subgraphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from aotexport.torch_internals.names import HigherOrderOperator


def is_operator(node: torch.fx.Node) -> bool:
    """Return whether a node calls an operator that takes functions."""
    return isinstance(node.target, HigherOrderOperator)


def subgraphs_of(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.GraphModule]:
    """Yield the subgraphs that a node of `graph` runs."""
    for operand in node.all_input_nodes:
        subgraph = getattr(graph, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(subgraph, torch.fx.GraphModule):
            yield subgraph


def new_placeholder(graph: torch.fx.GraphModule, name: str, value: Any) -> torch.fx.Node:
    """Return a new placeholder of value `value` after the existing ones."""
    last = next(reversed(graph.graph.find_nodes(op="placeholder")), None)
    with graph.graph.inserting_after(last) if last is not None else graph.graph.inserting_before():
        placeholder = graph.graph.placeholder(name)
    placeholder.meta["val"] = value
    return placeholder
