"""The matmuls of a functional graph, and the backend that a caller of `load` chooses for them. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import TensorMeta, ValueMeta

Mode = Literal["fastest", "onednn", "torch"]
VARIABLE = "AOTEXPORT_MATMUL"
"""Environment variable with the mode of calls that name none."""

_LEAST_SIZE = 16
_LEAST_WORK = 1 << 21
"""Least multiplications of a matmul that is worth measuring: below, oneDNN's fixed cost dominates."""


def mode_of(name: str | None) -> Mode:
    """Return the mode that the caller, or else the environment, names; there may be none (`NotSupported`)."""
    chosen = os.environ.get(VARIABLE, "fastest") if name is None else name
    if chosen not in ("fastest", "onednn", "torch"):
        asked = f"environment variable {VARIABLE} asks for the" if name is None else "no"
        raise NotSupported(f"{asked} `{chosen}` matmul backend; there are fastest, onednn, torch")
    return chosen


def is_worth_choosing(mode: Mode, rows: int, depth: int, columns: int) -> bool:
    """Return whether a matmul of these sizes may go to oneDNN."""
    least, work = (_LEAST_SIZE, _LEAST_WORK) if mode == "fastest" else (2, 0)
    return mode != "torch" and min(rows, depth, columns) >= least and rows * depth * columns >= work


OPERATORS = ("aten::mm.default", "aten::addmm.default", "aten::linear.default")


class Matmul(NamedTuple):
    """A float32 matmul, `rows` x `depth` by `depth` x `columns`, that may add a bias.

    `is_turned`: whether the second matrix lies in memory column by column.
    """

    name: str
    op: str
    rows: Size
    depth: Size
    columns: Size
    adds: bool
    is_turned: bool


def matmuls_of(nodes: Iterable[Node], metas: Mapping[str, ValueMeta]) -> Iterable[Matmul]:
    """Return the float32 matmuls among `nodes`; `metas` has the metadata of their operands."""
    for node in nodes:
        if node.op not in OPERATORS or node.kwargs:
            continue
        bias, *factors = operands(node.op, node.args)
        rows, matrix = (_meta(factor, metas) for factor in factors)
        if rows is None or matrix is None or len(rows.shape) != 2 or len(matrix.shape) != 2:
            continue
        is_weight = node.op == "aten::linear.default"
        columns = matrix.shape[0 if is_weight else 1]
        added = _meta(bias, metas)
        if bias is None or (added is not None and added.shape == (columns,)):
            is_turned = is_weight == (matrix.stride[1] == 1)
            yield Matmul(node.name, node.op, *rows.shape, columns, bias is not None, is_turned)


def operands(op: str, args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return the bias (None: none), the rows, and the matrix or weight of a call of one of `OPERATORS`."""
    if op == "aten::addmm.default":
        return args[0], args[1], args[2]
    return (args[2] if len(args) > 2 else None), args[0], args[1]


def _meta(argument: Any, metas: Mapping[str, ValueMeta]) -> TensorMeta | None:
    """Return the metadata of a float32 tensor; None: it is none."""
    meta = metas.get(argument) if isinstance(argument, str) else None
    return meta if isinstance(meta, TensorMeta) and meta.dtype == "float32" else None
