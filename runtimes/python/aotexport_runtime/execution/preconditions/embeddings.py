"""Embeddings and bags of them."""

from __future__ import annotations

from typing import Any

import torch

from aotexport_runtime.execution.preconditions.require import Arguments, contiguous, is_recorded, require, sizes, within


def embedding_bag(a: Arguments) -> None:
    """Check the rows that bags take and where the bags begin."""
    weight, indices, offsets = a["weight"], a["indices"], a["offsets"]
    require(weight.dim() == 2, "`weight` must have two axes")
    _mode(a)
    _bags(indices, offsets, weight.shape[0])
    sizes(a.get("per_sample_weights"), indices.shape, "`per_sample_weights`")
    if a["include_last_offset"] and offsets.shape[0] and is_recorded(a):
        require((offsets[-1:] == indices.shape[0]).all(), "with gradients the last of `offsets` must be the end")


def _mode(a: Arguments) -> None:
    # torch 2.7 takes another one and reads outside.
    require(0 <= a["mode"] <= _MAX, "`mode` must be from 0 to 2")


def _bags(indices: torch.Tensor, offsets: torch.Tensor, rows: Any) -> None:
    contiguous(offsets, "`offsets`")
    for values, what in ((indices, "`indices`"), (offsets, "`offsets`")):
        require(values.dim() == 1, f"{what} must have one axis")
        require(values.dtype in (torch.int32, torch.int64), f"{what} must be of dtype int32 or int64")
    within(indices, 0, rows, "`indices`")
    within(offsets, 0, indices.shape[0] + 1, "`offsets`")
    require(offsets.shape[0] or not indices.shape[0], "`offsets` must not be empty")
    if offsets.shape[0]:
        require((offsets[:1] == 0).all() & (offsets[1:] >= offsets[:-1]).all(), "`offsets` must rise from 0")


def embedding_bag_backward(a: Arguments) -> None:
    """Check the rows and bags that the forward kernel has told."""
    grad, indices, rows = a["grad"], a["indices"], a.get("num_weights")
    require(grad.dim() == 2, "`grad` must have two axes")
    _mode(a)
    rows = a["weight"].shape[0] if rows is None else rows
    within(indices, 0, rows, "`indices`")
    require(indices.dim() == 1, "`indices` must have one axis")
    if a["offset2bag"].numel() or a.get("offsets") is None:
        sizes(a["offset2bag"], indices.shape, "`offset2bag`")
    within(a["offset2bag"], 0, grad.shape[0], "`offset2bag`")
    if a.get("offsets") is not None:
        _bags(indices, a["offsets"], rows)
        bags = (a["offsets"] < indices.shape[0]).sum()
        require(bags <= grad.shape[0], "`grad` must have a row per bag")
    if a.get("bag_size") is not None and (a["bag_size"].numel() or (a["mode"] == _MEAN and a.get("offsets") is None)):
        require(a["bag_size"].numel() >= grad.shape[0], "`bag_size` must be a number per bag")
    for name in ("offset2bag", "bag_size", "maximum_indices"):
        contiguous(a.get(name), f"`{name}`")
    if a["mode"] == _MAX and a.get("maximum_indices") is not None:
        sizes(a["maximum_indices"], grad.shape, "`maximum_indices`")
        within(a["maximum_indices"], -1, rows, "`maximum_indices`")
    sizes(a.get("per_sample_weights"), indices.shape, "`per_sample_weights`")


_MEAN, _MAX = 1, 2
"""The modes of embedding bags that take the mean, and the greatest value."""


def embedding_backward(a: Arguments) -> None:
    """Check the rows that gradients are added to."""
    grad, indices, rows = a["grad_output"], a["indices"], a["num_weights"]
    require(grad.dim() >= 1, "`grad_output` must have an axis")
    sizes(grad, (*indices.shape, grad.shape[-1]), "`grad_output`")
    within(indices, 0, rows, "`indices`")
