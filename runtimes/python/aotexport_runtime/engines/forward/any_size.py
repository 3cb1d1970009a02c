"""Nodes that do the same for all sizes of their first argument."""

from __future__ import annotations

from msgspec.structs import replace

from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import TensorMeta, ValueMeta

_ALIKE = frozenset(
    f"aten::{name}.default"
    for name in ("contiguous", "dropout", "exp", "gelu", "log", "neg", "relu", "sigmoid", "silu", "tanh")
) | {"aten::log_softmax.int", "aten::softmax.int", "aten::to.dtype"}
"""Operators whose results have the shape of their first argument, and that take no other size."""

REDUCTIONS = frozenset(("aten::cross_entropy_loss.default",))
"""Operators whose results have a shape of their own, and that take no size."""

_INDEXING = ("aten::slice.Tensor", "aten::select.int")
_PLACES = (0, 1, -1, (1 << 63) - 1)
"""Where code begins, ends and selects by what it says itself, and not by a size."""


def takes_any_size(node: Node, meta: ValueMeta) -> bool:
    """Return whether the shape of a node's result follows from that of its first argument, which `meta` is of."""
    indexes = node.op in _INDEXING and not node.kwargs and all(place in _PLACES for place in node.args[2:])
    scales = node.op in ("aten::mul.Tensor", "aten::div.Tensor") and isinstance(node.args[1], float | int)
    return node.op in _ALIKE or indexes or scales or gathers(node, meta)


def gathers(node: Node, meta: ValueMeta) -> bool:
    """Return whether a node gathers all axes but the last one, whose size it names."""
    shape = meta.shape if isinstance(meta, TensorMeta) else ()
    named = node.args[1:] == [[-1, *shape[-1:]]] and len(shape) > 1 and isinstance(shape[-1], int)
    return named and node.op in ("aten::view.default", "aten::reshape.default")


def without_size(node: Node, meta: ValueMeta | None) -> Node:
    """Return a node that names no size of its first argument, if it gathers."""
    if not isinstance(meta, TensorMeta) or not gathers(node, meta):
        return node
    if len(meta.shape) == 2:
        return replace(node, op="aten::alias.default", args=node.args[:1])
    return replace(node, op="aten::flatten.using_ints", args=[node.args[0], 0, -2])
