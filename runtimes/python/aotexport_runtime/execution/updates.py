"""The update of Adam and AdamW by torch's fused operator."""

from __future__ import annotations

import math
from typing import Any

import torch

# Torch's own function: that of `torch.ops` takes longer than the update of a small parameter.
_update: Any = torch._fused_adamw_
_ENDLESS = torch.tensor(float("inf"))
"""Number of steps with which the operator corrects no bias: the corrections are in the divisor and the addend."""


def adam(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    weight: float,
    beta: float,
    kept: Any,
    divisor: Any,
    addend: Any,
) -> torch.Tensor:
    """Update a parameter and its moments in place, of one shape; return it.

    `weight` is that of the gradient in the first moment, `beta` that of the second moment, and `kept` that of the
    parameter, to which mean / (sqrt(square) / divisor + addend) is added. Source: torch 2.13, `optim/adam.py`,
    `_single_tensor_adam` with `capturable`.
    """
    if _is_fusible(parameter, grad, mean, square) and (rate := -float(divisor)) and math.isfinite(rate):
        given = [parameter], [grad], [mean], [square], [], [_ENDLESS]
        decay, eps = (1 - float(kept)) / rate, -rate * float(addend)
        _update(
            *given, lr=rate, beta1=1 - weight, beta2=beta, weight_decay=decay, eps=eps, amsgrad=False, maximize=False
        )
        # The operator raises no versions, by which changes are noticed.
        torch.autograd.graph.increment_version((parameter, mean, square))
        return parameter
    mean.lerp_(grad, weight)
    square.mul_(beta).addcmul_(grad, grad, value=1 - beta)
    return parameter.mul_(kept).addcdiv_(mean, square.sqrt().div_(divisor).add_(addend))


def _is_fusible(parameter: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> bool:
    """Return whether the operator, which reads memory by the parameter's number of elements, may have tensors."""
    return (
        type(grad) is torch.Tensor
        and (parameter.is_cpu and grad.is_cpu and mean.is_cpu and square.is_cpu)
        and (parameter.is_contiguous() and grad.is_contiguous() and mean.is_contiguous() and square.is_contiguous())
        and parameter.dtype is grad.dtype is mean.dtype is square.dtype
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.shape == grad.shape == mean.shape == square.shape
    )
