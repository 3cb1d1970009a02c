"""Windows that move over images: pooling and padding in backward, and samples at points of a grid."""

from __future__ import annotations

import math

import torch
from torch.torch_version import TorchVersion

from aotexport_runtime.execution.preconditions.require import (
    OPERATOR,
    Arguments,
    before,
    needs,
    require,
    sizes,
    spacious,
    within,
)

_MOST, _MOST_SIZE = 100_000, 1 << 31


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
