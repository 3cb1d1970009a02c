"""Linear layers of a loaded bundle over integers: weights as torchao quantises them, without activations."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from aotexport.errors import ModelFileInvalid
from aotexport_runtime.adapters.targets import Weights
from aotexport_runtime.module.bundle_module import BundleModule

Scheme = Literal["int4", "int8"]

_GROUPS = (128, 64, 32)
"""Inputs that share a scale in `int4`: the first number that divides those of the layer."""


class QuantizedLinear(nn.Module):
    """A linear layer (outputs by inputs) whose weight is computed of integers in every call.

    `int8`: `qdata` (outputs, inputs) by `scale` (outputs, 1), as torchao's `Int8Tensor`. `int4`: `qdata` (outputs,
    inputs / 2), even columns in the low bits, by `scale` plus `zero_point` (groups, outputs), as its `Int4Tensor`.
    Names are those of torchao's files.
    """

    _weight_qdata: torch.Tensor
    _weight_scale: torch.Tensor
    _weight_zero_point: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme) -> None:
        super().__init__()
        parts = _quantized(weight, scheme)
        for name, part in zip(("qdata", "scale", "zero_point"), parts, strict=False):
            self.register_parameter(f"_weight_{name}", nn.Parameter(part, requires_grad=False))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer computes."""
        q, scale = self._weight_qdata, self._weight_scale
        if not hasattr(self, "_weight_zero_point"):
            return functional.linear(x, q.type_as(scale).mul_(scale), self.bias)
        # Shifts of signed integers keep the sign.
        columns = torch.stack(((q << 4) >> 4, q >> 4), dim=-1).type_as(scale).view(len(q), len(scale), -1)
        weight = columns.mul_(scale.t().unsqueeze(-1)).add_(self._weight_zero_point.t().unsqueeze(-1))
        return functional.linear(x, weight.view(len(q), -1), self.bias)


def quantize(module: BundleModule, scheme: Scheme) -> None:
    """Put quantised layers in the place of linear ones, of any class, but tied ones and a language model's scores.

    `ModelFileInvalid`: there is none.
    """
    tied = {name for entry in module.bundle.manifest.state if entry.tied for name in (entry.name, *entry.tied)}
    found = dict[str, torch.Tensor]()
    for target in Weights(module).linear(called=True):
        weight = target.weight(module).detach()
        weight = weight.t() if target.kind == "transposed" else weight
        is_whole = scheme == "int8" or weight.shape[1] % _GROUPS[-1] == 0
        if target.path and target.name not in tied and target.computed is None and is_whole:
            found[target.path] = weight
    if not found:
        raise ModelFileInvalid(
            f"quantize: the bundle has no linear layer for {scheme}, beside that of a language model's scores"
            f"{'; int4 takes inputs in groups of 32' if scheme == 'int4' else ''}"
        )
    for path, weight in found.items():
        bias: Any = getattr(module.get_submodule(path), "bias", None)
        module.set_submodule(path, QuantizedLinear(weight, bias, scheme))


def _quantized(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, ...]:
    """Return the parts of a weight, rounded as torchao does (`choose_qparams_affine`, its `_tinygemm` for `int4`)."""
    if scheme == "int8":
        scale = (weight.abs().amax(1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
        q = (weight * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8)
        return q, scale
    size = next(size for size in _GROUPS if weight.shape[1] % size == 0)
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15.0).clamp(min=torch.finfo(weight.dtype).smallest_normal)
    zero_point = low + scale * 8
    low = zero_point - scale * 8
    q = ((groups - low.unsqueeze(2)) / scale.unsqueeze(2)).round().clamp(0, 15).to(torch.int8) - 8
    even, odd = q.flatten(1).unflatten(1, (-1, 2)).unbind(2)
    return (even & 15) | (odd << 4), scale.t().contiguous(), zero_point.t().contiguous()
