"""The matmuls of a functional graph that oneDNN may compute in place of torch's operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aotexport_runtime.execution.matmul.modes import Mode, is_worth_choosing
from aotexport_runtime.execution.matmul.operators import EverySize, FirstCall, MatmulReplacement
from aotexport_runtime.execution.matmul.sizes import matmuls_of
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import ValueMeta


def replacements(nodes: Iterable[Node], metas: Mapping[str, ValueMeta], mode: Mode) -> dict[str, MatmulReplacement]:
    """Return the replacement of each matmul that oneDNN may compute, by the value's name.

    Args:
        nodes: functional operators that run on the processor, where nothing records gradients.
        metas: metadata of their operands.
        mode: the matmul backend; `torch`: there are no replacements.
    """
    found: dict[str, MatmulReplacement] = {}
    for matmul in matmuls_of(nodes, metas) if mode != "torch" else ():
        rows, depth, columns = sizes = matmul.rows, matmul.depth, matmul.columns
        if not isinstance(rows, int) or not isinstance(depth, int) or not isinstance(columns, int):
            found[matmul.name] = EverySize(matmul.op, mode, [isinstance(size, int) for size in sizes])
        elif is_worth_choosing(mode, rows, depth, columns):
            found[matmul.name] = FirstCall(matmul.op, mode)
    return found
