"""Windows that move over images: pooling and padding in backward, and samples at points of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from aotexport_runtime.execution.preconditions.require import Arguments, require, sizes, spacious, within


def pool_backward(axes: int, *, looks: bool = True) -> Callable[[Arguments], None]:
    """Return the check of max pooling over so many axes: where each greatest value was.

    Args:
        axes: of the windows.
        looks: whether to look at the indices; else their sizes are checked alone.
    """

    def check(a: Arguments) -> None:
        grad, source, indices = a["grad_output"], a["self"], a["indices"]
        _of_images(source, grad, axes)
        sizes(indices, grad.shape, "`indices`")
        require(indices.dtype == torch.int64, "`indices` must be of dtype int64")
        if looks:
            within(indices, 0, math.prod(source.shape[-axes:]), "`indices`")

    return check


def fractional_pool_backward(axes: int) -> Callable[[Arguments], None]:
    """Return the check of fractional max pooling over so many axes."""
    check = pool_backward(axes)

    def check_sizes(a: Arguments) -> None:
        check(a)
        require(len(a["output_size"]) == axes, f"`output_size` must be {axes} numbers")
        spacious(a["indices"], "`indices`")

    return check_sizes


def fractional_pool(a: Arguments) -> None:
    """Check the sizes of the windows of fractional max pooling."""
    for name in ("kernel_size", "output_size"):
        require(all(0 < number < _MOST_SIZE for number in a[name]), f"`{name}` must be from 1 to below {_MOST_SIZE}")


def unfold_backward(a: Arguments) -> None:
    """Check that a gradient has the sizes of the windows; axes beside theirs may be of one element, for all."""
    windows = torch.empty(list(a["input_sizes"]), device="meta").unfold(a["dim"], a["size"], a["step"])
    grad, shape = a["grad_in"], list(windows.shape)
    folded = (a["dim"] % max(windows.dim() - 1, 1), windows.dim() - 1)
    for axis in range(windows.dim()) if grad.dim() == windows.dim() else ():
        if grad.shape[axis] == 1 and axis not in folded:
            shape[axis] = 1
    sizes(grad, shape, "`grad_in`")


def _of_images(source: torch.Tensor, grad: torch.Tensor, axes: int) -> None:
    require(source.dim() in (axes + 1, axes + 2), f"`self` must have {axes + 1} or {axes + 2} axes")
    sizes(grad, (*source.shape[:-axes], *grad.shape[-axes:]), "`grad_output`")


def average_backward(axes: int) -> Callable[[Arguments], None]:
    """Return the check of the backward of adaptive average pooling over so many axes."""

    def check(a: Arguments) -> None:
        _of_images(a["self"], a["grad_output"], axes)
        require(a["self"].numel() or not a["grad_output"].numel(), "`self` must not be empty")

    return check


def mean_backward(axes: int) -> Callable[[Arguments], None]:
    """Return the check of the backward of average pooling over so many axes."""
    return lambda a: _of_images(a["self"], a["grad_output"], axes)


def columns(a: Arguments) -> None:
    """Check that the sizes of windows have a product that kernels compute with."""
    for name in ("kernel_size", "dilation", "padding", "stride"):
        fits = all(number < _MOST_SIZE for number in a[name])
        require(fits, f"`{name}` must be below {_MOST_SIZE}")


_MOST_SIZE = 1 << 31


def places(a: Arguments) -> None:
    """Check the sizes of an adaptive pooling of no result, which the kernel walks through."""
    wanted = list(a["output_size"])
    require(0 not in wanted or max(wanted) <= _MOST, f"`output_size` must be at most {_MOST} beside 0")


_MOST = 100_000


def grid_sample(a: Arguments) -> None:
    """Check the numbers of modes, and the sizes of a gradient."""
    source, grid = a.get("input", a.get("self")), a["grid"]
    require(0 <= a.get("interpolation_mode", 0) <= 2, "`interpolation_mode` must be from 0 to 2")
    require(0 <= a.get("padding_mode", 0) <= 2, "`padding_mode` must be from 0 to 2")
    require(grid.dim() == source.dim() >= 4, "`grid` must have as many axes as `input`, four or more")
    sizes(a.get("grad_output"), (*source.shape[:2], *grid.shape[1:-1]), "`grad_output`")


def padding_backward(axes: int, kind: str) -> Callable[[Arguments], None]:
    """Return the check of the backward of padding over so many axes: `reflection` or `replication`."""

    def check(a: Arguments) -> None:
        source, grad, padding = a["self"], a["grad_output"], list(a["padding"])
        _of_images(source, grad, axes)
        require(len(padding) == 2 * axes, f"`padding` must be {2 * axes} numbers")
        for axis in range(1, axes + 1):
            before, after = padding[2 * axis - 2 : 2 * axis]
            size = source.shape[-axis]
            require(size > 0, "`self` must not be empty")
            if kind == "reflection":
                require(before < size and after < size, "`padding` must be smaller than the image")
            require(grad.shape[-axis] == size + before + after, "`grad_output` must have the size of the padded image")

    return check
