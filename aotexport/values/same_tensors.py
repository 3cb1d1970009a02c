"""Compare tensors bit by bit: 0.0 is not -0.0, and a NaN is itself."""

from __future__ import annotations

import torch

from aotexport_runtime.values.subclasses import parts


def have_same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, sizes and values; strides and devices may differ."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(parts(a.detach()), parts(b.detach()), strict=True)
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in pairs)


def are_same(a: object, b: object) -> bool:
    """Return whether two values are equal, tensors among them with the same strides."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.stride() == b.stride() and have_same_values(a, b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)
