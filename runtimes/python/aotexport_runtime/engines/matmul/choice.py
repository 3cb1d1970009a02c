"""Which products of a functional graph may be computed by another library than torch's operators call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aotexport_runtime.engines.matmul.modes import Mode, is_worth_choosing
from aotexport_runtime.engines.matmul.operators import EverySize, FirstCall, StandIn
from aotexport_runtime.engines.matmul.sizes import products_of
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import ValueMeta


def stand_ins(nodes: Iterable[Node], metas: Mapping[str, ValueMeta], mode: Mode) -> dict[str, StandIn]:
    """Return what stands for each product that oneDNN may compute, by the value's name.

    Args:
        nodes: functional operators that run on the processor, where nothing records gradients.
        metas: metadata of their operands.
        mode: `torch`: there are none.
    """
    found: dict[str, StandIn] = {}
    for product in products_of(nodes, metas) if mode != "torch" else ():
        rows, depth, columns = sizes = product.rows, product.depth, product.columns
        if not isinstance(rows, int) or not isinstance(depth, int) or not isinstance(columns, int):
            found[product.name] = EverySize(product.op, mode, [isinstance(size, int) for size in sizes])
        elif is_worth_choosing(mode, rows, depth, columns):
            found[product.name] = FirstCall(product.op, mode)
    return found
