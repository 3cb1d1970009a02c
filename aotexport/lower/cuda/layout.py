"""The order of a tensor's axes in memory."""

from __future__ import annotations

import torch


def memory_order(value: torch.Tensor) -> list[int]:
    """Return the axes of a tensor by their steps in memory, the longest first."""
    steps = [step if isinstance(step, int) else step.node.hint for step in value.stride()]
    return sorted(range(value.dim()), key=lambda axis: (-steps[axis], axis))


def laid_out_in(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, dense, with its axes in memory in the order of those of `like`."""
    order = memory_order(like)
    return value.permute(order).contiguous().permute(inverse(order))


def inverse(order: list[int]) -> list[int]:
    """Return the order that undoes one."""
    return sorted(range(len(order)), key=lambda place: order[place])
