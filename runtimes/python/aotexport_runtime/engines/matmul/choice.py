"""Which products of a functional graph may be computed by another library than torch's operators call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aotexport_runtime.engines.matmul import onednn
from aotexport_runtime.engines.matmul.modes import Mode, is_worth_choosing
from aotexport_runtime.engines.matmul.operators import EverySize, FirstCall, StandIn
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import TensorMeta, ValueMeta


def stand_ins(nodes: Iterable[Node], metas: Mapping[str, ValueMeta], mode: Mode) -> dict[str, StandIn]:
    """Return what stands for each product that oneDNN may compute, by the value's name.

    Args:
        nodes: functional operators that run on the processor, where nothing records gradients.
        metas: metadata of their operands.
        mode: `torch`: there are none.
    """
    found: dict[str, StandIn] = {}
    for node in nodes if mode != "torch" else ():
        sizes = _sizes(node, metas)
        if sizes is None:
            continue
        rows, depth, columns = sizes
        if not isinstance(rows, int) or not isinstance(depth, int) or not isinstance(columns, int):
            found[node.name] = EverySize(node.op, mode, [isinstance(size, int) for size in sizes])
        elif is_worth_choosing(mode, rows, depth, columns):
            found[node.name] = FirstCall(node.op, mode)
    return found


def _sizes(node: Node, metas: Mapping[str, ValueMeta]) -> tuple[Size, Size, Size] | None:
    """Return rows, depth and columns of a product of matrices of float32, perhaps with a bias; None: it is no such."""
    if node.op not in onednn.PRODUCTS or node.kwargs:
        return None
    added, *operands = onednn.operands(node.op, node.args)
    rows, matrix = (_matrix(argument, metas) for argument in operands)
    if rows is None or matrix is None or len(rows) != 2 or len(matrix) != 2:
        return None
    columns = matrix[0] if node.op == "aten::linear.default" else matrix[1]
    if added is not None and _matrix(added, metas) != (columns,):
        return None
    return rows[0], rows[1], columns


def _matrix(argument: Any, metas: Mapping[str, ValueMeta]) -> tuple[Size, ...] | None:
    """Return the sizes of a tensor of float32 on processors."""
    meta = metas.get(argument) if isinstance(argument, str) else None
    return meta.shape if isinstance(meta, TensorMeta) and meta.dtype == "float32" else None
