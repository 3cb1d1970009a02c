"""Operators of the operator set that a release of torch has no longer, by those that it has.

Operators that differ by their signature alone are in `allowed/signatures.py`. All others that the running torch lacks
are refused at load, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _cholesky(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return torch.linalg.cholesky(self, upper=upper)


def _qr(self: torch.Tensor, some: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = torch.linalg.qr(self, mode="reduced" if some else "complete")
    return q, r


ADAPTERS: dict[str, Callable[..., Any]] = {
    # Gone from torch 2.15.
    "cholesky.default": _cholesky,
    "qr.default": _qr,
}
"""By operator, what computes the same values and gradients, with the arguments that the operator set says."""
