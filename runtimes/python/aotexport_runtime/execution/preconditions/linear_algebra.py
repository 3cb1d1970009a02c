"""Factorizations, eigenvalues, distances and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from aotexport_runtime.execution.preconditions.require import Arguments, contiguous, is_recorded, require, sizes, within


def fourier(a: Arguments) -> None:
    """Check the axes of a Fourier transform, which its kernels take as they are."""
    axes, rank, source = list(a["dim"]), a["self"].dim(), a["self"]
    require(axes and all(0 <= axis < rank for axis in axes), f"`dim` must be axes from 0 to below {rank}")
    require(len({*axes}) == len(axes), "`dim` must name each axis once")
    size = a.get("last_dim_size")
    if size is not None:
        require(size >= 1, "`last_dim_size` must be positive")
        require(source.shape[axes[-1]] >= size // 2 + 1, f"axis {axes[-1]} is too short for `last_dim_size`")
        require(source.shape[axes[-1]] <= size, f"axis {axes[-1]} is longer than `last_dim_size`")


def pairs(a: Arguments) -> None:
    """Check the distances of all pairs of rows."""
    rows = a["self"]
    require(rows.dim() == 2, "`self` must have two axes")
    count = rows.shape[0] * (rows.shape[0] - 1) // 2
    for name in ("grad", "pdist"):
        sizes(a.get(name), (count,), f"`{name}`")
    require(rows.is_contiguous(), "`self` must be contiguous")
    if "grad" in a or is_recorded(a):
        require(rows.shape[0] > 0, "`self` must have rows")
    if "grad" in a:
        sizes(a.get("out"), rows.shape, "`out`")


def rows(a: Arguments) -> None:
    """Check that there are rows whose distances backward asks for."""
    require(a["self"].shape[:1] != (0,) or not is_recorded(a), "`self` must have rows")


def matrices(a: Arguments) -> None:
    """Check that there are matrices: of less, the kernel of torch 2.7 leaves its memory."""
    require(min(a["self"].dim(), a["grad"].dim()) >= 2, "`self` and `grad` must have two axes or more")


def of_bytes(a: Arguments) -> None:
    """Check the strides of matrices of 8-bit integers: of an axis without steps the kernel writes nothing."""
    for name in ("self", "mat2"):
        has_steps = all(step or size == 1 for size, step in zip(a[name].shape, a[name].stride(), strict=True))
        require(has_steps, f"elements of `{name}` must not share memory")


def grouped(a: Arguments) -> None:
    """Check where the groups of a product end."""
    one, other, ends = a["self"], a["mat2"], a["offs"]
    if ends is not None:
        require(ends.dim() == 1 and ends.dtype == torch.int32, "`offs` must be a row of int32")
        contiguous(ends, "`offs`")
        most = one.shape[-1] if one.dim() == other.dim() == 2 else one.shape[0] if one.dim() == 2 else other.shape[-1]
        within(ends, 0, most + 1, "`offs`")
        require((ends[1:] >= ends[:-1]).all(), "`offs` must not fall")
        if is_recorded(a):
            # Backward leaves the gradient of what is in no group as it found it.
            require((ends[-1:] == most).all() and (len(ends) or not most), f"with gradients `offs` must end at {most}")


def grouped_written(a: Arguments, result: torch.Tensor) -> None:
    """Write the rows or columns of no group, which the kernel leaves."""
    one, other, ends = a["self"], a["mat2"], a["offs"]
    if ends is not None and one.dim() != other.dim():
        axis = 0 if one.dim() == 2 else 1
        places = torch.arange(result.shape[axis], device=result.device)
        beyond = places >= (ends[-1] if ends.numel() else 0)
        result.data.masked_fill_(beyond[:, None] if axis == 0 else beyond, 0)


def power(a: Arguments) -> None:
    """Check that an exponent has an opposite number: the kernel for negative ones asks for it."""
    require(a["n"] > -(1 << 63), "`n` must not be the least integer")


def pivots(name: str) -> Callable[[Arguments], None]:
    """Return the check of the rows that a factorization has swapped: `lu` or `ldl`."""

    def check(a: Arguments) -> None:
        matrix, swaps = (a["LU_data"], a["LU_pivots"]) if name == "lu" else (a["LD"], a["pivots"])
        require(matrix.dim() >= 2, "the matrix must have two axes or more")
        rows, count = matrix.shape[-2], min(matrix.shape[-2:])
        require(swaps.dtype == torch.int32, "pivots must be of dtype int32")
        sizes(swaps, (*matrix.shape[:-2], count), "pivots")
        within(swaps if name == "lu" else swaps.abs(), 1, rows + 1, "pivots")
        if name == "ldl":
            _blocks(swaps)

    return check


def _blocks(swaps: torch.Tensor) -> None:
    """Check that negative pivots come in pairs, one for each row of a block of two: the kernel skips the second."""
    negative = (swaps < 0).unbind(-1)
    half = torch.zeros_like(swaps[..., :0].sum(-1), dtype=torch.bool)
    for pivot in negative:
        require((pivot | ~half).all(), "negative pivots must come in pairs")
        half = pivot & ~half
    require(~half.any(), "negative pivots must come in pairs")


def triangles(a: Arguments) -> None:
    """Check results given by the caller: kernels of triangles take their matrices to lie one after the other."""
    for name in ("out", "L", "U", "R"):
        if name in a:
            require(a[name].dim() <= 3 or a[name].is_contiguous(), f"`{name}` must be contiguous")


def unpacked_into(a: Arguments) -> None:
    """Check the rows that a factorization has swapped, and results given by the caller."""
    pivots("lu")(a)
    triangles(a)


def finite(a: Arguments) -> None:
    """Check that a matrix has eigenvalues: LAPACK's balancing leaves its memory where it does not converge."""
    require(torch.isfinite(a["self"]).all(), "`self` must be finite")
