"""Gradients of outputs, in the layouts that a joint graph was traced with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aotexport_runtime import dtypes, sizes
from aotexport_runtime.schema.program import Tangent

LayOut = Callable[[torch.Tensor, dict[str, int]], torch.Tensor]
"""Gives a tangent, for these values of symbols, in the layout of the capture."""


def layout(spec: Tangent) -> LayOut:
    """Return a function that gives a tangent in the layout and dtype that the joint graph was traced with."""
    dtype, memory_format = dtypes.dtype(spec.meta.dtype), spec.memory_format
    if memory_format is not None:
        format_ = dtypes.MEMORY_FORMATS[memory_format]
        contiguous = format_ is torch.contiguous_format

        def formatted(tangent: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
            if tangent.dtype is not dtype:
                tangent = tangent.to(dtype)
            # Asking is much cheaper than what does nothing.
            return tangent if contiguous and tangent.is_contiguous() else tangent.contiguous(memory_format=format_)

        return formatted
    assert spec.stride is not None
    steps = spec.stride

    def strided(tangent: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
        tangent = tangent if tangent.dtype is dtype else tangent.to(dtype)
        stride = tuple([sizes.evaluate(step, symbols) for step in steps])
        if tangent.stride() == stride:
            return tangent
        if _overlaps(tangent.shape, stride):
            return tangent.contiguous()
        laid_out = torch.empty_strided(tangent.shape, stride, dtype=dtype, device=tangent.device)
        return laid_out.copy_(tangent)

    return strided


def zeros(spec: Tangent, like: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
    """Return zeros for an undefined tangent, on the device of `like`."""
    shape = [sizes.evaluate(size, symbols) for size in spec.meta.shape]
    return layout(spec)(torch.zeros(shape, dtype=dtypes.dtype(spec.meta.dtype), device=like.device), symbols)


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements of such a layout may share memory, as those of `unfold` do."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False
