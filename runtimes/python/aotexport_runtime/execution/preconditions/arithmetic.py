"""Arithmetic of integers, polynomials, and lists of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from aotexport_runtime.execution.preconditions.require import Arguments, require, sizes, spacious, within

_MOST = 100_000


def _least_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of the integers that are the least of their dtype, whose negative the dtype lacks."""
    return tensor == torch.iinfo(tensor.dtype).min


def _are_integers(*values: Any) -> bool:
    return all(
        not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if isinstance(value, torch.Tensor)
        else isinstance(value, int)
        for value in values
    )


def common_multiple(a: Arguments) -> None:
    """Check for integers whose absolute value their dtype lacks."""
    for name in ("self", "other"):
        if _are_integers(a[name]):
            require(~_least_of(a[name]).any(), f"`{name}` must not hold the least number of its dtype")


def truncated(a: Arguments) -> None:
    """Check for the one quotient of integers that their dtype lacks."""
    numbers, other = a["self"], a["other"]
    if a.get("rounding_mode") == "trunc" and _are_integers(numbers, other):
        # Processors end the process then.
        dtype = torch.result_type(numbers, other)
        numbers, other = (torch.as_tensor(each).to(dtype) for each in (numbers, other))
        require(~(_least_of(numbers) & (other == -1)).any(), "the least number of a dtype cannot be divided by -1")


def degree(a: Arguments) -> None:
    """Check the degree of a polynomial, which the kernel computes in a loop."""
    degrees = a["n"] if isinstance(a["n"], torch.Tensor) else torch.tensor(a["n"])
    require((degrees <= _MOST).all(), f"`n` must be at most {_MOST}")


def undefined(a: Arguments, result: torch.Tensor) -> None:
    """Write NaN where a polynomial is of NaN: the kernels of torch 2.13 leave what was in the processor."""
    numbers, degrees = torch.as_tensor(a["x"]), torch.as_tensor(a["n"])
    result.data.masked_fill_((torch.isnan(numbers) & (degrees >= 2)).to(result.device), math.nan)


def repeats(a: Arguments) -> None:
    """Check how often elements are repeated: the kernel writes so many places into a result of `output_size`."""
    counts, wanted = a["repeats"], a["output_size"]
    if isinstance(counts, torch.Tensor):
        within(counts, 0, 1 << 31, "`repeats`")
        require(wanted is None or (counts.sum() == wanted), "`repeats` must add up to `output_size`")


def steps(a: Arguments) -> None:
    """Check the step of a range of integers, which is rounded to one."""
    dtype = a["out"].dtype if "out" in a else a["dtype"]
    of_integers = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    require(not of_integers or int(a["step"]) != 0, "`step` must not be 0 as an integer")


def powers(a: Arguments) -> None:
    """Check that a sum of powers is not of complex numbers in a real dtype."""
    dtype, tensors = a["dtype"], a["self"] if isinstance(a["self"], list | tuple) else [a["self"]]
    fits = dtype is None or all(dtype.is_complex == tensor.is_complex() for tensor in tensors)
    require(fits, "`dtype` must be complex as `self` is")


def leaks(a: Arguments) -> None:
    """Check where a randomised ReLU writes."""
    spacious(a["noise"], "`noise`")
    sizes(a.get("out"), a["self"].shape, "`out`")


def gelu_backward(a: Arguments) -> None:
    """Check that each number has a gradient: the kernel of oneDNN does not repeat them."""
    sizes(a["grad_output"], a["self"].shape, "`grad_output`")


def medians(a: Arguments) -> None:
    """Check the stride of the axis: with none the kernel of torch 2.13 takes numbers beyond the tensor."""
    source, axis = a["self"], a["dim"]
    if -source.dim() <= axis < source.dim():
        apart = source.stride(axis) != 0 or source.shape[axis] <= 1
        require(apart, "elements of `self` along `dim` must not share memory")


def counts(a: Arguments) -> None:
    """Check the counts of binomial draws: of NaN the kernel draws without end."""
    require(~torch.isnan(a["count"]).any(), "`count` must not be NaN")


def shuffled(a: Arguments) -> None:
    """Check the groups of channels, by which torch 2.7 divides unseen."""
    source, groups = a["self"], a["groups"]
    require(source.dim() > 2 and groups > 0 and source.shape[1] % groups == 0, "`groups` must divide the channels")


def differentiable(a: Arguments) -> None:
    """Check that a loss is of floating numbers: of integers it divides by 0."""
    require(a["self"].is_floating_point(), "`self` must be of a floating dtype")


def chunks(a: Arguments) -> None:
    """Check the axis at which tensors are cut."""
    tensors = a["tensors"]
    axis = a["dim"] + (tensors[0].dim() if tensors and a["dim"] < 0 else 0)
    require(axis >= 0 and all(tensor.dim() > axis for tensor in tensors), "every tensor must have axis `dim`")


def sections(a: Arguments) -> None:
    """Check into how many parts a tensor is split: empty ones have no other bound."""
    require(a["sections"] <= _MOST, f"`sections` must be at most {_MOST}")


def lists(a: Arguments) -> None:
    """Check that lists fit together: autograd takes an item of each before a kernel looks."""
    lengths = {len(value) for value in a.values() if isinstance(value, list | tuple)}
    require(len(lengths) == 1 and 0 not in lengths, "all lists must be of one length, and not empty")


def uniform_integers(a: Arguments) -> None:
    """Check where random integers without an upper limit begin: the kernel looks for a number that the dtype counts."""
    dtype = a["self"].dtype
    if a["to"] is None and dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        require(-most <= a["from"] <= most, f"`from` must be from {-most} to {most}")
