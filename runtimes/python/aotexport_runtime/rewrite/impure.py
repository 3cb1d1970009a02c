"""Nodes that run even when nothing uses their results."""

from __future__ import annotations

from typing import Any

import torch

from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import NothingMeta, SubgraphArgument

_SWITCHES = ("dropout_p", "dropout", "train", "training")
"""Arguments of random operators that draw nothing where one of these is zero or False."""


def impure_nodes(graph: Graph) -> set[str]:
    """Return the nodes that run even when nothing uses their result: they draw random numbers, or check for errors."""
    return random_nodes(graph) | {node.name for node in graph.nodes if isinstance(node.meta, NothingMeta)}


def random_nodes(graph: Graph) -> set[str]:
    """Return the nodes that draw random numbers, themselves or in a subgraph that they run."""
    known: dict[str, bool] = {}
    return {node.name for node in graph.nodes if draws(graph, node, known)}


def draws(graph: Graph, node: Node, known: dict[str, bool]) -> bool:
    """Return whether a node of `graph`, or a subgraph that it runs, draws; `known`: by subgraph, filled."""
    if node.op.startswith("aten::"):
        return _operator_draws(node)
    subgraphs = [argument.name for argument in node.args if isinstance(argument, SubgraphArgument)]
    for name in subgraphs:
        if name not in known:
            known[name] = bool(random_nodes(graph.subgraphs[name]))
    return any(known[name] for name in subgraphs)


def _operator_draws(node: Node) -> bool:
    base, _, overload = node.op.removeprefix("aten::").partition(".")
    function: Any = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    for index, argument in enumerate(function._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if argument.name in _SWITCHES and given in (0, False):
            return False
    return True
