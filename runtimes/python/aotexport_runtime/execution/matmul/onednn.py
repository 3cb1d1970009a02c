"""Matmuls by oneDNN, which every torch for processors has, and the choice between it and torch's own operators.

It keeps torch's operator within its bounds: it reads a bias as contiguous without checking, and fails on empty sums.
Results are fresh, in torch's layout, without gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from aotexport_runtime.execution.matmul.measured import described, faster_by_onednn
from aotexport_runtime.execution.matmul.sizes import Matmul, Mode, is_worth_choosing, operands

Run = Callable[..., torch.Tensor]

_SIZES = 16
"""Most sizes of a matmul that are decided; oneDNN takes 0.7 ms to prepare for each."""

_linear: Run | None = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def available() -> bool:
    """Return whether torch has oneDNN here, switched on and computing in full precision."""
    return (
        _linear is not None
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.get_float32_matmul_precision() == "highest"
    )


def mm(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return `torch.mm(rows, matrix)`; no size is 0 or 1."""
    return linear(rows, matrix.t())


def addmm(bias: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return `torch.addmm(bias, rows, matrix)`; no size is 0 or 1, and the bias is as long as a row of the result."""
    return linear(rows, matrix.t(), bias)


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear(rows, weight, bias)` under the same conditions."""
    if not _takes(weight):
        return functional.linear(rows, weight, bias)
    assert _linear is not None
    return _linear(rows, weight, None if bias is None else bias.contiguous(), "none", (), "")


def _takes(matrix: torch.Tensor) -> bool:
    """Return whether oneDNN has a layout for a second operand, or for its transpose."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


MATMULS: dict[str, Run] = {"aten::mm.default": mm, "aten::addmm.default": addmm, "aten::linear.default": linear}
"""The operators above by name."""

_TORCHS: dict[str, Run] = {
    "aten::mm.default": torch.mm,
    "aten::addmm.default": torch.addmm,
    "aten::linear.default": functional.linear,
}


def prefers_onednn(
    op: str, args: Sequence[torch.Tensor], mode: Mode, is_fixed: Sequence[bool] = (True, True, True)
) -> bool:
    """Return whether oneDNN is to compute a matmul of these operands; measures it where `mode` is `fastest`.

    Args:
        op: its operator.
        args: its operands, in the layout that it computes with.
        mode: the caller's choice.
        is_fixed: whether its rows, depth and columns are fixed.
    """
    _, rows, matrix = operands(op, args)
    if mode == "torch" or not available() or rows.device.type != "cpu" or not _takes(matrix):
        return False
    ours, torchs = functools.partial(MATMULS[op], *args), functools.partial(_TORCHS[op], *args)
    return mode == "onednn" or faster_by_onednn(described(op, args, is_fixed), ours, torchs)


def would_prefer_onednn(matmul: Matmul, sizes: tuple[int, int, int], mode: Mode) -> bool:
    """Return what the first call of a matmul of these rows, depth and columns decides."""
    rows, depth, columns = sizes
    matrix = torch.ones(columns, depth).t() if matmul.is_turned else torch.ones(depth, columns)
    if matmul.adds:
        return prefers_onednn("aten::addmm.default", [torch.ones(columns), torch.ones(rows, depth), matrix], mode)
    return prefers_onednn("aten::mm.default", [torch.ones(rows, depth), matrix], mode)


def replacement(op: str, mode: Mode, is_fixed: Sequence[bool]) -> Run:
    """Return a function that computes a matmul; it chooses a library at the first call of each size.

    Sizes after the first few run by torch's operator. `is_fixed`: whether its rows, depth and columns are fixed.
    """
    chosen: dict[Any, Run] = {}
    torchs, first = _TORCHS[op], 1 if op == "aten::addmm.default" else 0

    def matmul(*args: Any) -> Any:
        sizes = args[first].shape, args[first + 1].shape
        run = chosen.get(sizes)
        if run is None:
            # Tensors of tracers and transforms cannot be timed.
            is_plain = all(type(arg) in (torch.Tensor, torch.nn.Parameter) for arg in args if arg is not None)
            if len(chosen) == _SIZES or not is_plain:
                return torchs(*args)
            rows, depth, columns = *sizes[0], sizes[1][0 if op == "aten::linear.default" else 1]
            prefers = is_worth_choosing(mode, rows, depth, columns) and prefers_onednn(op, args, mode, is_fixed)
            run = chosen[sizes] = MATMULS[op] if prefers else torchs
        return run(*args)

    return matmul
