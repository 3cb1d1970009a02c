"""Arithmetic of integers, polynomials, and lists of tensors."""

from __future__ import annotations

from typing import Any

import torch

from aotexport_runtime.engines.preconditions.require import Arguments, require


def _least_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return where integers are the least of their dtype, whose negative the dtype lacks."""
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
        require(~(_least_of(numbers) & (other == -1)).any(), "the least number of a dtype cannot be divided by -1")


def degree(a: Arguments) -> None:
    """Check the degree of a polynomial, which the kernel computes in a loop."""
    degrees = a["n"] if isinstance(a["n"], torch.Tensor) else torch.tensor(a["n"])
    require((degrees <= _MOST_DEGREES).all(), f"`n` must be at most {_MOST_DEGREES}")


_MOST_DEGREES = 100_000


def steps(a: Arguments) -> None:
    """Check the step of a range of integers, which is rounded to one."""
    of_integers = a["dtype"] is not None and not (a["dtype"].is_floating_point or a["dtype"].is_complex)
    require(not of_integers or int(a["step"]) != 0, "`step` must not be 0 as an integer")


def differentiable(a: Arguments) -> None:
    """Check that a loss is of floating numbers: of integers it divides by 0."""
    require(a["self"].is_floating_point(), "`self` must be of a floating dtype")


def chunks(a: Arguments) -> None:
    """Check the axis at which tensors are cut."""
    require(
        a["dim"] >= 0 and all(tensor.dim() > a["dim"] for tensor in a["tensors"]), "every tensor must have axis `dim`"
    )


def pairwise(a: Arguments) -> None:
    """Check that two lists of tensors fit together."""
    require(len(a["self"]) == len(a["src"]) > 0, "`self` and `src` must be lists of one length")
