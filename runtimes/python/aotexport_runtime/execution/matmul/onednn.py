"""Matmuls by oneDNN, which every torch for processors has: fresh results in torch's layout, and no gradients.

They keep torch's operator within its bounds: it reads a bias as contiguous without checking, and fails on empty sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_linear: Callable[..., torch.Tensor] | None = getattr(
    getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None
)


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
    if not takes(weight):
        return torch.nn.functional.linear(rows, weight, bias)
    assert _linear is not None
    return _linear(rows, weight, None if bias is None else bias.contiguous(), "none", (), "")


def takes(matrix: torch.Tensor) -> bool:
    """Return whether oneDNN has a layout for a second operand, or for its transpose."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


MATMULS: dict[str, Callable[..., torch.Tensor]] = {
    "aten::mm.default": mm,
    "aten::addmm.default": addmm,
    "aten::linear.default": linear,
}
"""The operators above by name."""
