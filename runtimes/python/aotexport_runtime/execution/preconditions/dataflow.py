"""Values that need no look, since the same graph has made them."""

from __future__ import annotations

import torch

from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.validate import references

_BY_FORWARD = {
    "aten::max_pool2d_with_indices_backward.default": ("aten::max_pool2d_with_indices.default", 7),
    "aten::max_pool3d_with_indices_backward.default": ("aten::max_pool3d_with_indices.default", 7),
    "aten::adaptive_max_pool2d_backward.default": ("aten::adaptive_max_pool2d.default", 2),
    "aten::adaptive_max_pool3d_backward.default": ("aten::adaptive_max_pool3d.default", 2),
}
"""Backward operators with the forward operator that gives their indices, and the position of these."""

WRITES_UNSEEN = frozenset(("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm"))
"""Operators that write into an argument, and neither say so in their schema nor raise its version, by base name."""


def are_indices_proven(graph: Graph, node: Node) -> bool:
    """Return whether the indices of a pooling's backward are those of its forward over the same image.

    They are if the graph takes them from the forward operator, which writes indices within its image; if only such
    backwards ever get them, so that nobody else has their memory; and if no operator of the graph changes a tensor, and
    with it the sizes of the image.
    """
    forward, place = _BY_FORWARD.get(node.op, ("", 0))
    if not forward or len(node.args) <= place or not isinstance(node.args[place], str):
        return False
    nodes = {each.name: each for each in graph.nodes}
    item = nodes.get(str(node.args[place]))
    if item is None or item.op != "python::getitem" or item.args[1] != 1:
        return False
    pool = nodes.get(str(item.args[0]))
    if pool is None or pool.op != forward or pool.args[0] != node.args[1]:
        return False
    others = [
        each
        for each in graph.nodes
        if each is not item
        and each.op not in _BY_FORWARD
        and (each.op, *each.args) != ("python::getitem", pool.name, 0)
    ]
    given = [value for each in others for value in (*each.args, *each.kwargs.values())]
    is_private = {pool.name, item.name}.isdisjoint(
        name for value in [*given, *graph.outputs] for name in references(value)
    )
    return is_private and all(map(writes_nothing, {each.op for each in graph.nodes}))


def writes_nothing(op: str) -> bool:
    """Return whether an operator changes no tensor that it takes: False for one whose schema is not known."""
    namespace, _, rest = op.partition("::")
    base, _, overload = rest.partition(".")
    if namespace == "aten":
        found = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        return found is not None and not found._schema.is_mutable and base not in WRITES_UNSEEN
    return namespace == "python"
