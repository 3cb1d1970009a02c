"""Losses, softmax and distances in backward."""

from __future__ import annotations

import torch

from aotexport_runtime.execution.preconditions.require import Arguments, require, sizes, within

REDUCTIONS = (0, 1, 2)
"""No reduction, mean, and sum."""


def reduction(a: Arguments) -> None:
    """Check how a loss is reduced: by another number no kernel writes a result."""
    require(a["reduction"] in REDUCTIONS, "`reduction` must be 0, 1 or 2")


def margins(a: Arguments) -> None:
    """Check that there is a sample: of none, no kernel writes a reduced loss."""
    reduction(a)
    require(a["reduction"] == 0 or a["self"].numel() > 0, "`self` must not be empty")


def margins_backward(a: Arguments) -> None:
    """Check that there is a gradient, one for each sample where the loss is not reduced."""
    reduction(a)
    source, count = a["self"], a["grad_output"].numel()
    require(count > 0 or source.numel() == 0, "`grad_output` must not be empty")
    if a["reduction"] == 0:
        samples = source.shape[0] if source.dim() > 1 else 1
        require(count == samples, f"`grad_output` must be {samples} numbers")


def classes_backward(a: Arguments) -> None:
    """Check the classes that targets name; of a reduced loss the kernel does."""
    reduction(a)
    source, target = a["self"], a["target"]
    if a["reduction"] == 0 and source.dim() > 1:
        named = torch.where(target == a["ignore_index"], 0, target)
        within(named, 0, source.shape[1], "`target`, but for `ignore_index`,")


def entropy(a: Arguments) -> None:
    """Check that each probability has a target, and a gradient in backward."""
    reduction(a)
    sizes(a["target"], a["self"].shape, "`target`")
    if "grad_output" in a and a["grad_output"].dim():
        sizes(a["grad_output"], a["self"].shape, "`grad_output`")


def softmax_backward(a: Arguments) -> None:
    """Check that each gradient has a probability."""
    sizes(a["output"], a["grad_output"].shape, "`output`")


def distances_backward(a: Arguments) -> None:
    """Check the distances between two sets of points."""
    one, other = a["x1"], a["x2"]
    require(one.dim() >= 2 and other.dim() >= 2, "`x1` and `x2` must have two axes or more")
    require(one.shape[-1] == other.shape[-1], "the points of `x1` and `x2` must have as many coordinates")
    batch = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    for name in ("grad", "cdist"):
        sizes(a[name], (*batch, one.shape[-2], other.shape[-2]), f"`{name}`")
