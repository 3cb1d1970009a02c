"""Random operators whose functional forms draw in another order, or give another layout, than eager's.

Source: torch 2.13, `aten/src/ATen/native/Dropout.cpp` (`_dropout_impl`, `native_dropout_cpu`), `Activation.cpp`
(`rrelu_with_noise_cpu`), `Distributions.cpp` (`bernoulli`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_SLOPE = 1.7580993408473766
"""The negative limit of SELU."""


def _bernoulli(tensor: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    return tensor.copy_(_ones_drawn(tensor, p))


def _alpha_dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    scale = 1 / math.sqrt((_SLOPE * _SLOPE * p + 1) * (1 - p))
    kept = _ones_drawn(tensor, 1 - p).to(tensor.dtype)
    shift = kept.add(-1).mul(_SLOPE * scale).add(_SLOPE * scale * p)
    return tensor.mul(kept.mul(scale)).add(shift)


def _ones_drawn(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Return true with probability `p`, laid out and drawn as by `empty_like(tensor).bernoulli_(p)`.

    The functional form of `bernoulli_` draws row after row, where eager draws in the order of the memory.
    """
    return torch.native_dropout(torch.ones_like(tensor), 1 - p, True)[1]


DRAWN_IN_MEMORY: dict[Any, Callable[..., torch.Tensor]] = {
    aten.alpha_dropout.default: _alpha_dropout,
    aten.bernoulli_.float: _bernoulli,
}
"""Functions to trace in place of operators on processors, where the first argument is not laid out row by row."""

MADE_CONTIGUOUS = (aten.rrelu.default, aten.rrelu_with_noise.default)
"""Operators whose results are contiguous in eager, and laid out as the argument in their functional forms."""
