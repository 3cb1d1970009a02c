"""Arithmetic, lists, polynomials, factorizations, distances, Fourier transforms, windows that move over images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.torch_version import TorchVersion

from aotexport_runtime.execution.preconditions.require import (
    OPERATOR,
    Arguments,
    after,
    before,
    contiguous,
    is_recorded,
    needs,
    require,
    sized,
    sizes,
    spacious,
    within,
)

_MOST, _MOST_SIZE = 100_000, 1 << 31

_POLYNOMIALS = (
    *(f"special_{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("special_hermite_polynomial_h", "special_hermite_polynomial_he"),
    *("special_laguerre_polynomial_l", "special_legendre_polynomial_p"),
)


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


@before("lcm", "lcm_")
def _common_multiple(a: Arguments) -> None:
    for name in ("self", "other"):
        is_allowed = not _are_integers(a[name]) or ~_least_of(a[name]).any()
        require(is_allowed, f"`{name}` must not hold the least number of its dtype")


@before(
    *(f"{base}.{other}_mode" for base in ("div", "div_", "divide", "divide_") for other in ("Tensor", "Scalar")),
    "div.out_mode",
)
def _truncated(a: Arguments) -> None:
    numbers, other = a["self"], a["other"]
    if a.get("rounding_mode") == "trunc" and _are_integers(numbers, other):
        # Processors end the process then.
        dtype = torch.result_type(numbers, other)
        numbers, other = (torch.as_tensor(each).to(dtype) for each in (numbers, other))
        require(~(_least_of(numbers) & (other == -1)).any(), "the least number of a dtype cannot be divided by -1")


before(*_POLYNOMIALS)(needs(lambda a: (torch.as_tensor(a["n"]) <= _MOST).all(), f"`n` must be at most {_MOST}"))


before("combinations")(needs(lambda a: a["r"] <= _MOST, f"`r` must be at most {_MOST}"))


@after(*_POLYNOMIALS)
def _undefined(a: Arguments, result: torch.Tensor) -> None:
    """Write NaN where a polynomial is of NaN: the kernels of torch 2.13 leave what was in the processor."""
    numbers, degrees = torch.as_tensor(a["x"]), torch.as_tensor(a["n"])
    result.data.masked_fill_((torch.isnan(numbers) & (degrees >= 2)).to(result.device), math.nan)


@before("repeat_interleave")
def _repeats(a: Arguments) -> None:
    """Check how often elements are repeated: the kernel writes so many places into a result of `output_size`."""
    counts, wanted = a["repeats"], a["output_size"]
    if isinstance(counts, torch.Tensor):
        within(counts, 0, 1 << 31, "`repeats`")
        require(wanted is None or (counts.sum() == wanted), "`repeats` must add up to `output_size`")


@before("range.step", "range.out")
def _steps(a: Arguments) -> None:
    dtype = a["out"].dtype if "out" in a else a["dtype"]
    of_integers = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    require(not of_integers or int(a["step"]) != 0, "`step` must not be 0 as an integer")


@before("linalg__powsum", "_foreach_powsum")
def _powers(a: Arguments) -> None:
    dtype, tensors = a["dtype"], a["self"] if isinstance(a["self"], list | tuple) else [a["self"]]
    fits = dtype is None or all(dtype.is_complex == tensor.is_complex() for tensor in tensors)
    require(fits, "`dtype` must be complex as `self` is")


@before("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")
def _leaks(a: Arguments) -> None:
    spacious(a, "noise")
    sizes(a, a["self"].shape, "out")


# The kernel of oneDNN does not repeat gradients.
before("gelu_backward")(lambda a: sizes(a, a["self"].shape, "grad_output"))


@before("median.dim", "median.dim_values", "nanmedian.dim", "nanmedian.dim_values")
def _medians(a: Arguments) -> None:
    """Check the stride of the axis: with none the kernel of torch 2.13 takes numbers beyond the tensor."""
    source, axis = a["self"], a["dim"]
    if -source.dim() <= axis < source.dim():
        apart = source.stride(axis) != 0 or source.shape[axis] <= 1
        require(apart, "elements of `self` along `dim` must not share memory")


# Of NaN the kernel draws without end.
before("binomial")(needs(lambda a: ~torch.isnan(a["count"]).any(), "`count` must not be NaN"))
# Of integers it divides by 0.
before("smooth_l1_loss_backward", "mvlgamma_")(
    needs(lambda a: a["self"].is_floating_point(), "`self` must be of a floating dtype")
)
before("native_channel_shuffle")(
    needs(
        lambda a: a["self"].dim() > 2 and a["groups"] > 0 and a["self"].shape[1] % a["groups"] == 0,
        "`groups` must divide the channels",
    )
)


@before("_chunk_cat")
def _chunks(a: Arguments) -> None:
    tensors = a["tensors"]
    axis = a["dim"] + (tensors[0].dim() if tensors and a["dim"] < 0 else 0)
    require(axis >= 0 and all(tensor.dim() > axis for tensor in tensors), "every tensor must have axis `dim`")


# Empty parts have no other bound.
before("tensor_split.sections")(needs(lambda a: a["sections"] <= _MOST, f"`sections` must be at most {_MOST}"))


def lists(a: Arguments) -> None:
    """Check that lists fit together: autograd takes an item of each before a kernel looks."""
    lengths = {len(value) for value in a.values() if isinstance(value, list | tuple)}
    require(len(lengths) == 1 and 0 not in lengths, "all lists must be of one length, and not empty")


@before("random.from", "random.from_out", "random_.from")
def _uniform_integers(a: Arguments) -> None:
    """Check where random integers without an upper limit begin: the kernel looks for a number that the dtype counts."""
    dtype = a["self"].dtype
    if a["to"] is None and dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        require(-most <= a["from"] <= most, f"`from` must be from {-most} to {most}")


@before("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fourier(a: Arguments) -> None:
    axes, rank, source = list(a["dim"]), a["self"].dim(), a["self"]
    require(axes and all(0 <= axis < rank for axis in axes), f"`dim` must be axes from 0 to below {rank}")
    require(len({*axes}) == len(axes), "`dim` must name each axis once")
    size = a.get("last_dim_size")
    if size is not None:
        require(size >= 1, "`last_dim_size` must be positive")
        require(source.shape[axes[-1]] >= size // 2 + 1, f"axis {axes[-1]} is too short for `last_dim_size`")
        require(source.shape[axes[-1]] <= size, f"axis {axes[-1]} is longer than `last_dim_size`")


@before("_pdist_forward", "_pdist_backward")
def _pairs(a: Arguments) -> None:
    rows = a["self"]
    require(rows.dim() == 2, "`self` must have two axes")
    sizes(a, (rows.shape[0] * (rows.shape[0] - 1) // 2,), "grad", "pdist")
    contiguous(a, "self")
    if "grad" in a:
        sizes(a, rows.shape, "out")
    require(len(rows) or not ("grad" in a or is_recorded(a)), "`self` must have rows")


before("pdist")(needs(lambda a: a["self"].shape[:1] != (0,) or not is_recorded(a), "`self` must have rows"))
# Of less, the kernel of torch 2.7 leaves its memory.
before("matrix_exp_backward")(
    needs(lambda a: min(a["self"].dim(), a["grad"].dim()) >= 2, "`self` and `grad` must have two axes or more")
)


@before("_int_mm")
def _of_bytes(a: Arguments) -> None:
    """Check the strides of matrices of 8-bit integers: of an axis without steps the kernel writes nothing."""
    for name in ("self", "mat2"):
        has_steps = all(step or size == 1 for size, step in zip(a[name].shape, a[name].stride(), strict=True))
        require(has_steps, f"elements of `{name}` must not share memory")


@before("_grouped_mm")
def _grouped(a: Arguments) -> None:
    one, other, ends = a["self"], a["mat2"], a["offs"]
    if ends is not None:
        require(ends.dim() == 1 and ends.dtype == torch.int32, "`offs` must be a row of int32")
        contiguous(a, "offs")
        most = one.shape[-1] if one.dim() == other.dim() == 2 else one.shape[0] if one.dim() == 2 else other.shape[-1]
        within(ends, 0, most + 1, "`offs`")
        require((ends[1:] >= ends[:-1]).all(), "`offs` must not fall")
        if is_recorded(a):
            # Backward leaves the gradient of what is in no group as it found it.
            require((ends[-1:] == most).all() and (len(ends) or not most), f"with gradients `offs` must end at {most}")


@after("_grouped_mm")
def _grouped_written(a: Arguments, result: torch.Tensor) -> None:
    """Write the rows or columns of no group, which the kernel leaves."""
    one, other, ends = a["self"], a["mat2"], a["offs"]
    if ends is not None and one.dim() != other.dim():
        axis = 0 if one.dim() == 2 else 1
        places = torch.arange(result.shape[axis], device=result.device)
        beyond = places >= (ends[-1] if ends.numel() else 0)
        result.data.masked_fill_(beyond[:, None] if axis == 0 else beyond, 0)


# The kernel for negative exponents asks for their opposite numbers.
before("matrix_power", "linalg_matrix_power")(needs(lambda a: a["n"] > -(1 << 63), "`n` must not be the least integer"))


@before("lu_unpack", "linalg_ldl_solve")
def _pivots(a: Arguments) -> None:
    is_lu = a[OPERATOR].startswith("lu")
    matrix, swaps = (a["LU_data"], a["LU_pivots"]) if is_lu else (a["LD"], a["pivots"])
    require(matrix.dim() >= 2, "the matrix must have two axes or more")
    rows, count = matrix.shape[-2], min(matrix.shape[-2:])
    require(swaps.dtype == torch.int32, "pivots must be of dtype int32")
    sized(swaps, (*matrix.shape[:-2], count), "pivots")
    within(swaps if is_lu else swaps.abs(), 1, rows + 1, "pivots")
    # One for each row of a block of two: the kernel skips the second.
    half = torch.zeros(swaps.shape[:-1], dtype=torch.bool, device=swaps.device)
    for pivot in () if is_lu else (swaps < 0).unbind(-1):
        require((pivot | ~half).all(), "negative pivots must come in pairs")
        half = pivot & ~half
    require(~half.any(), "negative pivots must come in pairs")


@before("tril.out", "triu.out", "linalg_lu.out", "linalg_qr.out")
def _triangles(a: Arguments) -> None:
    """Check results given by the caller: kernels of triangles take their matrices to lie one after the other."""
    for name in ("out", "L", "U", "R"):
        if name in a:
            require(a[name].dim() <= 3 or a[name].is_contiguous(), f"`{name}` must be contiguous")


@before("lu_unpack.out")
def _unpacked_into(a: Arguments) -> None:
    _pivots(a)
    _triangles(a)


# LAPACK's balancing leaves its memory where it does not converge.
before("_linalg_eigvals", "linalg_eigvals")(needs(lambda a: torch.isfinite(a["self"]).all(), "`self` must be finite"))


# --- windows that move over images, in backward above all, and samples at points of a grid -------------------


def _axes(a: Arguments) -> int:
    """Return over how many axes the windows of an operator move, by its name."""
    return next(int(letter) for letter in a[OPERATOR] if letter.isdigit())


@before("avg_pool2d_backward", "avg_pool3d_backward")
def _of_images(a: Arguments) -> None:
    axes, shape = _axes(a), a["self"].shape
    require(len(shape) in (axes + 1, axes + 2), f"`self` must have {axes + 1} or {axes + 2} axes")
    sizes(a, (*shape[:-axes], *a["grad_output"].shape[-axes:]), "grad_output")


@before(*(f"{kind}{axes}d_backward" for kind in ("adaptive_max_pool", "fractional_max_pool") for axes in (2, 3)))
@before(*(f"max_pool{axes}d_with_indices_backward" for axes in (2, 3)))
def _pool_backward(a: Arguments) -> None:
    indices = a["indices"]
    _of_images(a)
    sizes(a, a["grad_output"].shape, "indices")
    require(indices.dtype == torch.int64, "`indices` must be of dtype int64")
    within(indices, 0, math.prod(a["self"].shape[-_axes(a) :]), "`indices`")
    if "fractional" in a[OPERATOR]:
        require(len(a["output_size"]) == _axes(a), f"`output_size` must be {_axes(a)} numbers")
        spacious(a, "indices")


@before("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional_pool(a: Arguments) -> None:
    for name in ("kernel_size", "output_size"):
        require(all(0 < number < _MOST_SIZE for number in a[name]), f"`{name}` must be from 1 to below {_MOST_SIZE}")


@before("unfold_backward")
def _unfold_backward(a: Arguments) -> None:
    windows = torch.empty(list(a["input_sizes"]), device="meta").unfold(a["dim"], a["size"], a["step"])
    grad, shape, last = a["grad_in"], list(windows.shape), windows.dim() - 1
    for axis in range(last) if grad.dim() == windows.dim() else ():
        if grad.shape[axis] == 1 and axis != a["dim"] % max(last, 1):
            shape[axis] = 1
    sizes(a, shape, "grad_in")


@before("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _average_backward(a: Arguments) -> None:
    _of_images(a)
    require(a["self"].numel() or not a["grad_output"].numel(), "`self` must not be empty")


@before("im2col", "col2im", "max_pool1d")
# torch 2.7 divides by zero groups, and by strides that overflow; 2.11 does not.
@before(*(("convolution", "convolution_backward") if TorchVersion(torch.__version__) < "2.11" else ()))
def _columns(a: Arguments) -> None:
    """Check that the sizes of windows have a product that kernels compute with, and that there are groups."""
    for name in ("kernel_size", "dilation", "padding", "stride", "output_padding"):
        require(all(number < _MOST_SIZE for number in a.get(name, ())), f"`{name}` must be below {_MOST_SIZE}")
    require(a.get("groups", 1) > 0, "`groups` must be at least 1")


before("max_unpool2d")(needs(lambda a: len(a["output_size"]) == 2, "`output_size` must be 2 numbers"))
before("pixel_shuffle")(
    needs(lambda a: 0 < a["upscale_factor"] < _MOST_SIZE, f"`upscale_factor` must be from 1 to below {_MOST_SIZE}")
)
before(*(f"{kind}_pool{axes}d" for kind in ("adaptive_max", "adaptive_avg", "_adaptive_avg") for axes in (1, 2, 3)))(
    needs(
        lambda a: 0 not in a["output_size"] or max(a["output_size"]) <= _MOST,
        f"`output_size` must be at most {_MOST} beside 0",
    )
)


@before(*(f"grid_sampler{kind}{part}" for kind in ("", "_2d", "_3d") for part in ("", "_backward")))
@before("cudnn_grid_sampler", "cudnn_grid_sampler_backward")
def _grid_sample(a: Arguments) -> None:
    source, grid = a.get("input", a.get("self")), a["grid"]
    for mode in ("interpolation_mode", "padding_mode"):
        require(0 <= a.get(mode, 0) <= 2, f"`{mode}` must be from 0 to 2")
    require(grid.dim() == source.dim() >= 4, "`grid` must have as many axes as `input`, four or more")
    sizes(a, (*source.shape[:2], *grid.shape[1:-1]), "grad_output")


@before(*(f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3)))
def _padding(a: Arguments) -> None:
    require(len(a["padding"]) == 2 * _axes(a), f"`padding` must be {2 * _axes(a)} numbers")


@before(*(f"{kind}_pad{axes}d_backward" for kind in ("reflection", "replication") for axes in (1, 2, 3)))
def _padding_backward(a: Arguments) -> None:
    _of_images(a)
    _padding(a)
    for axis in range(1, _axes(a) + 1):
        low, high = a["padding"][2 * axis - 2 : 2 * axis]
        size = a["self"].shape[-axis]
        require(size > 0, "`self` must not be empty")
        is_within = "replication" in a[OPERATOR] or max(low, high) < size
        require(is_within, "`padding` must be smaller than the image")
        fits = a["grad_output"].shape[-axis] == size + low + high
        require(fits, "`grad_output` must have the size of the padded image")
