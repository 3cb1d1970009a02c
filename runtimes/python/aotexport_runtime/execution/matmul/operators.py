"""Replacements of matmuls in generated code, which choose between torch's operator and oneDNN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.execution import ops
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.execution.matmul.measured import described, faster_by_onednn
from aotexport_runtime.execution.matmul.sizes import Mode, is_worth_choosing, matmuls_of, operands
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import ValueMeta

Run = Callable[..., Any]

_SIZES = 16
"""Most sizes of a matmul that are decided; oneDNN takes 0.7 ms to prepare for each."""


def replacements(nodes: Iterable[Node], metas: Mapping[str, ValueMeta], mode: Mode) -> dict[str, Run]:
    """Return the replacement of each matmul that oneDNN may compute, by the value's name.

    `nodes` are functional operators that run on the processor, where nothing records gradients.
    """
    found: dict[str, Run] = {}
    for matmul in matmuls_of(nodes, metas) if mode != "torch" else ():
        sizes = matmul.rows, matmul.depth, matmul.columns
        fixed = [size for size in sizes if isinstance(size, int)]
        if len(fixed) < len(sizes) or is_worth_choosing(mode, *fixed):
            found[matmul.name] = replacement(matmul.op, mode, [isinstance(size, int) for size in sizes])
    return found


def replacement(op: str, mode: Mode, is_fixed: Sequence[bool]) -> Run:
    """Return a function that computes a matmul; it chooses a library at the first call of each size.

    Sizes after the first few run by torch's operator. `is_fixed`: whether its rows, depth and columns are fixed.
    """
    chosen: dict[Any, Run] = {}
    torchs, first = _torchs(op), 1 if op == "aten::addmm.default" else 0

    def matmul(*args: Any) -> Any:
        sizes = args[first].shape, args[first + 1].shape
        run = chosen.get(sizes)
        if run is None:
            if len(chosen) == _SIZES or not _are_plain(args):
                return torchs(*args)
            rows, depth, columns = *sizes[0], sizes[1][0 if op == "aten::linear.default" else 1]
            prefers = is_worth_choosing(mode, rows, depth, columns) and _prefers_onednn(op, args, mode, is_fixed)
            run = chosen[sizes] = onednn.MATMULS[op] if prefers else torchs
        return run(*args)

    return matmul


def prefers_onednn(rows: int, depth: int, columns: int, *, adds: bool, is_turned: bool, mode: Mode) -> bool:
    """Return whether oneDNN computes a matmul, `rows` x `depth` by `depth` x `columns`, as its first call would decide.

    Args:
        rows: a size.
        depth: a size.
        columns: a size.
        adds: whether a bias is added.
        is_turned: whether the second matrix lies in memory column by column.
        mode: see `replacements`.
    """
    if mode == "torch":
        return False
    matrix = torch.ones(columns, depth).t() if is_turned else torch.ones(depth, columns)
    args = [torch.ones(rows, depth), matrix]
    if adds:
        return _prefers_onednn("aten::addmm.default", [torch.ones(columns), *args], mode)
    return _prefers_onednn("aten::mm.default", args, mode)


def _torchs(op: str) -> Run:
    return ops.direct(op) or ops.resolve(op, None, frozenset())


def _are_plain(args: Sequence[Any]) -> bool:
    """Return whether the arguments are real tensors, which can be timed: not those of tracers and transforms."""
    return all(type(arg) in (torch.Tensor, torch.nn.Parameter) for arg in args if arg is not None)


def _prefers_onednn(op: str, args: Sequence[Any], mode: Mode, is_fixed: Sequence[bool] = (True, True, True)) -> bool:
    _, rows, matrix = operands(op, args)
    if not onednn.available() or rows.device.type != "cpu" or not onednn.takes(matrix):
        return False
    if mode == "onednn":
        return True
    ours, torchs = functools.partial(onednn.MATMULS[op], *args), functools.partial(_torchs(op), *args)
    return faster_by_onednn(described(op, args, is_fixed), ours, torchs)
