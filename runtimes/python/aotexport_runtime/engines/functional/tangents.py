"""Tangents, the gradients of outputs: laid out as a joint graph was traced, undefined, or never flowing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph, Tangent
from aotexport_runtime.values import dtypes, sizes

LayOut = Callable[[torch.Tensor, dict[str, int]], torch.Tensor]
"""Returns a tangent in the layout of the capture, for these values of symbols."""


def layout(spec: Tangent) -> LayOut:
    """Return a function that converts a tangent to the layout and dtype that the joint graph was traced with."""
    dtype, memory_format = dtypes.dtype(spec.meta.dtype), spec.memory_format
    if memory_format is not None:
        format_ = getattr(torch, memory_format)
        contiguous = format_ is torch.contiguous_format

        def formatted(tangent: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
            if tangent.dtype is not dtype:
                tangent = tangent.to(dtype)
            # Asking is much cheaper than a conversion that does nothing.
            return tangent if contiguous and tangent.is_contiguous() else tangent.contiguous(memory_format=format_)

        return formatted
    assert spec.stride is not None
    steps = spec.stride

    def strided(tangent: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
        tangent = tangent if tangent.dtype is dtype else tangent.to(dtype)
        stride = tuple([sizes.evaluate(step, symbols) for step in steps])
        if tangent.stride() == stride:
            return tangent
        # Exports no longer write such layouts; existing bundles may have them.
        if _overlaps(tangent.shape, stride):
            return tangent.contiguous()
        laid_out = torch.empty_strided(tangent.shape, stride, dtype=dtype, device=tangent.device)
        return laid_out.copy_(tangent)

    return strided


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements of such a layout may share memory, as those of `unfold` do."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def zeros(spec: Tangent, shape: Sequence[int], device: torch.device, symbols: dict[str, int]) -> torch.Tensor:
    """Return zeros of a shape for an undefined tangent."""
    return layout(spec)(torch.zeros(shape, dtype=dtypes.dtype(spec.meta.dtype), device=device), symbols)


def positions_of_tangents(functional: FunctionalGraph) -> list[int]:
    """Return per tangent the position of its result among those of the joint graph's forward."""
    assert functional.gradients is not None
    mutations, outputs = len(functional.mutations), len(functional.outputs)
    start = {"mutation": 0, "output": mutations, "intermediate_base": mutations + outputs}
    return [start[tangent.of] + tangent.index for tangent in functional.gradients.tangents]


def flowless_outputs(functional: FunctionalGraph) -> set[int]:
    """Return the outputs that require grad though no gradient flows through them: views made under `torch.no_grad`."""
    if functional.gradients is None:
        return set()
    reached = {tangent.index for tangent in functional.gradients.tangents if tangent.of == "output"}
    required = {i for i, o in enumerate(functional.outputs) if isinstance(o, FreshOutput) and o.requires_grad}
    return required - reached
