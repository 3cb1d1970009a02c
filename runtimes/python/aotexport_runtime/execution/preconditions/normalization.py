"""Batch norm and weight norm."""

from __future__ import annotations

import math

from aotexport_runtime.execution.preconditions.require import Arguments, contiguous, require, sizes, spacious

_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


def batch_norm(a: Arguments) -> None:
    """Check that there is a number per channel wherever the kernel reads one."""
    source = a["input"]
    require(source.dim() >= 2, "`input` must have two axes or more")
    channels, trains = (source.shape[1],), _trains(a)
    for name in _OF_CHANNELS:
        given = a.get(name)
        if given is not None and given.shape != channels:
            # Outside of train mode the kernel gives empty tensors for what it saves, and reads none.
            require(
                name.startswith("save_") and given.numel() == 0 and not trains,
                f"`{name}` must have the sizes {channels}, not {tuple(given.shape)}",
            )
    if not trains and "running_mean" in a:
        given = a["running_mean"] is not None and a["running_var"] is not None
        require(given, "`running_mean` and `running_var` must be given")
        # Backward reads a copy in order after it has freed it.
        for name in ("running_mean", "running_var"):
            contiguous(a[name], f"`{name}`")
    for name in ("grad_out", "grad_output"):
        sizes(a.get(name), source.shape, f"`{name}`")
    if trains:
        saved = [name for name in _OF_CHANNELS if name.startswith("save_") and name in a]
        require(all(a[name] is not None for name in saved), "what the forward kernel saved must be given")


def _trains(a: Arguments) -> bool:
    return a.get("train", a.get("update", a.get("training", True)))


def batch_norm_without_update(a: Arguments) -> None:
    """Check batch norm that reads running statistics, or has none and is in train mode in all but name."""
    batch_norm({**a, "training": False})


def batch_norm_without_statistics(a: Arguments) -> None:
    """Check batch norm that has no running statistics, which only train mode needs not."""
    require(a["training"], "without running statistics `training` must be true")
    batch_norm(a)


def group_norm(a: Arguments) -> None:
    """Check the size of the input, and that there is memory for the numbers of each channel."""
    # From 2.14 torch gives memory that nobody has written for an `N` of 0.
    require(a["input"].numel() == a["N"] * a["C"] * a["HxW"], "`input` must have `N * C * HxW` elements")
    for name in ("weight", "bias"):
        spacious(a[name], f"`{name}`")


def group_norm_backward(a: Arguments) -> None:
    """Check the groups of channels, and the sizes of the gradient."""
    require(a["group"] >= 1 and a["C"] % a["group"] == 0, "`C` must be a multiple of `group`")
    sizes(a["grad_out"], a["input"].shape, "`grad_out`")
    for name in ("grad_out", "input", "mean", "rstd", "weight"):
        spacious(a[name], f"`{name}`")


def layer_norm_backward(a: Arguments) -> None:
    """Check the sizes of the gradient, and that there is a number per row wherever the kernel reads one."""
    source, axes = a["input"], len(a["normalized_shape"])
    sizes(a["grad_out"], source.shape, "`grad_out`")
    rows = math.prod(source.shape[: source.dim() - axes])
    for name in ("mean", "rstd"):
        if name in a:
            require(a[name].numel() == rows, f"`{name}` must be {rows} numbers")
    for name in ("mean", "rstd"):  # The kernel takes any gradient.
        spacious(a.get(name), f"`{name}`")


def weight_norm(a: Arguments) -> None:
    """Check that there is a norm per slice of `v`."""
    direction, norms, axis = (a.get(f"{name}", a.get(f"saved_{name}")) for name in ("v", "g", "dim"))
    rank = direction.dim()
    require(0 <= axis < rank, f"`dim` must be from 0 to below {rank}")
    size = direction.shape[axis]
    require(direction.numel() > 0, "`v` must not be empty")
    require(norms.numel() == size, f"`g` must be {size} numbers")
    require(norms.dtype == direction.dtype, "`g` must be of the dtype of `v`")
    for name in ("saved_norms", "grad_w"):
        if a.get(name) is not None:
            expected = size if name == "saved_norms" else direction.numel()
            require(a[name].numel() == expected, f"`{name}` must be {expected} numbers")


def fused_weight_norm(a: Arguments) -> None:
    """Check weight norm by the kernel that takes its tensors to be contiguous."""
    weight_norm(a)
    for name in ("v", "g", "grad_w", "saved_v", "saved_g", "saved_norms"):
        contiguous(a.get(name), f"`{name}`")
