"""Nodes that run even when nothing uses their results."""

from __future__ import annotations

import torch

from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.values import NothingMeta


def impure_nodes(graph: Graph) -> set[str]:
    """Return the nodes that run even when nothing uses their result: they draw random numbers, or check for errors."""
    return random_nodes(graph) | {node.name for node in graph.nodes if isinstance(node.meta, NothingMeta)}


def random_nodes(graph: Graph) -> set[str]:
    """Return the nodes that draw random numbers."""
    names: set[str] = set()
    for node in graph.nodes:
        if node.op.startswith("aten::"):
            base, _, overload = node.op.removeprefix("aten::").partition(".")
            function = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
                names.add(node.name)
    return names
