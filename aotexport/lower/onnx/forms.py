"""Operators that torch's exporter or ONNX Runtime do not support as they are, in forms that they support."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from aotexport.torch_internals.names import batch_norm, mish_backward, nll_loss, silu_backward
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values.sizes import UNDEFINED, evaluate, symbols_of

aten = torch.ops.aten
Tensor = torch.Tensor
Form = Callable[..., Any]
"""Computes an operator on its arguments by others. May raise `NoForm`."""


class NoForm(Exception):
    """An operator has no form for these arguments, or torch's exporter would compute something else; says why."""


def as_strided(meta: TensorMeta, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a strided view of an operand, with metadata `meta`, after a permutation to the order of its memory."""
    layouts = [_layout(meta, base) for base in (5, 11)]
    if layouts[0] is None or layouts[0] != layouts[1]:
        raise NoForm("the operand's memory has gaps, and ONNX knows none. Make it contiguous first")
    repeated, order = layouts[0]
    for axis in reversed(repeated):
        value = aten.select.int(value, axis, 0)
    if order != sorted(order):
        value = aten.permute.default(value, order)
    return aten.as_strided.default(value, *args, **kwargs)


def _layout(meta: TensorMeta, base: int) -> tuple[list[int], list[int]] | None:
    """Return the axes along which a tensor repeats its memory, and the order of the others, counted without these.

    Symbols have values from `base` on. None: there are gaps in its memory, or other overlaps.
    """
    names = sorted({name for size in (*meta.shape, *meta.stride) for name in symbols_of(size)})
    symbols = {name: base + 2 * index for index, name in enumerate(names)}
    try:
        shape, stride = _numbers(meta.shape, symbols), _numbers(meta.stride, symbols)
    except UNDEFINED:
        return None
    repeated = [axis for axis, step in enumerate(stride) if step == 0 and shape[axis] != 1]
    unrepeated = [axis for axis in range(len(shape)) if axis not in repeated]
    order = sorted(range(len(unrepeated)), key=lambda index: (-stride[unrepeated[index]], -shape[unrepeated[index]]))
    step = 1
    for axis in (unrepeated[index] for index in reversed(order)):
        if shape[axis] != 1 and stride[axis] != step:
            return None
        step *= shape[axis]
    return repeated, order


def _numbers(sizes: Sequence[Size], symbols: Mapping[str, int]) -> list[int]:
    return [evaluate(size, symbols) for size in sizes]


def _batch_norm(
    value: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: Any
) -> Tensor:
    """Return a batch normalisation; in training by single steps, which also write the running statistics."""
    if not training:
        return aten.batch_norm.default(value, weight, bias, running_mean, running_var, training, *rest)
    momentum, eps, *_ = rest
    return batch_norm(value, weight, bias, running_mean, running_var, True, momentum, eps, functional=False)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by two matmuls, which runtimes fuse; 0 where a mask hides a whole row.

    Torch's exporter takes sizes apart in every layer, and looks for NaN in all weights.
    """
    width = query.shape[-1]
    if dropout_p or not isinstance(width, int):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten.scaled_dot_product_attention.default(query, key, value, mask, dropout_p, is_causal, **options)
    if enable_gqa:
        key, value = (
            aten.repeat_interleave.self_int(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value)
        )
    scores, seen = _scores(query, key, mask, is_causal, scale)
    result = aten.matmul.default(aten.softmax.int(scores, -1), value)
    return result if seen is None else aten.where.ScalarOther(seen, result, 0.0)


def _scores(query: Tensor, key: Tensor, mask: Any, is_causal: bool, scale: Any) -> tuple[Tensor, Tensor | None]:
    """Return the scores of attention, and the rows of which a mask lets something be seen; None: all."""
    width = query.shape[-1]
    scores = aten.matmul.default(query * (width**-0.5 if scale is None else scale), aten.transpose.int(key, -2, -1))
    if is_causal:
        rows, columns = (aten.arange.default(size, device=query.device) for size in scores.shape[-2:])
        mask = aten.ge.Tensor(aten.unsqueeze.default(rows, 1), columns)
    if mask is None:
        return scores, None
    bias = mask
    if mask.dtype == torch.bool:
        bias = aten.where.self(
            mask, *(aten.scalar_tensor.default(each, dtype=query.dtype) for each in (0.0, -math.inf))
        )
    if is_causal:
        return scores + bias, None
    return scores + bias, aten.any.dim(mask if mask.dtype == torch.bool else mask > -math.inf, -1, True)


def _attention_with_sums(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return attention, and in place of its sums, which backward computes anew, its queries."""
    mask, scale = options.get("attn_mask"), options.get("scale")
    return _attention(query, key, value, mask, dropout_p, is_causal, scale=scale), query


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """Return the gradients of what attention takes; its weights are computed anew."""
    *_, is_causal = rest
    scale = query.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    scores, seen = _scores(query, key, options.get("attn_mask"), is_causal, scale)
    weights = aten.softmax.int(scores, -1)
    weights = weights if seen is None else aten.where.ScalarOther(seen, weights, 0.0)
    to_weights = weights * aten.matmul.default(grad, aten.transpose.int(value, -2, -1))
    to_scores = (to_weights - weights * aten.sum.dim_IntList(to_weights, [-1], True)) * scale
    turned = (aten.transpose.int(each, -2, -1) for each in (to_scores, weights))
    return aten.matmul.default(to_scores, key), *map(aten.matmul.default, turned, (query, grad))


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return a matmul by a vector as one by a matrix of one row or column.

    An optimisation of ONNX Runtime (1.31, `MatmulTransposeFusion`) loses the transposition of the other operand.
    """
    if left.dim() == 1 != right.dim():
        return aten.squeeze.dim(aten.matmul.default(aten.unsqueeze.default(left, 0), right), -2)
    if right.dim() == 1 != left.dim():
        return aten.squeeze.dim(aten.matmul.default(left, aten.unsqueeze.default(right, 1)), -1)
    return aten.matmul.default(left, right)


def _scatter_reduce(value: Tensor, axis: int, index: Tensor, source: Tensor, reduce: str, **kwargs: Any) -> Tensor:
    """Return a scatter with a mean as one with a sum, divided by a count: ONNX has no mean."""
    scatter = aten.scatter_reduce.two
    if reduce != "mean":
        return scatter(value, axis, index, source, reduce, **kwargs)
    if not value.is_floating_point():
        raise NoForm("the mean of integers is rounded. Convert them first")
    ones = [aten.ones_like.default(each) for each in (value, source)]
    total, count = (scatter(each[0], axis, index, each[1], "sum", **kwargs) for each in ([value, source], ones))
    return total / count


def _convolution_backward(
    grad: Tensor,
    value: Tensor,
    weight: Tensor,
    biases: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a convolution's operands, each by a convolution, where the mask asks for it.

    That of the weight moves the smaller one of input and output over the larger one, with rows as channels.
    """
    axes, zeros = range(2, grad.dim()), [0] * (grad.dim() - 2)
    to_value = to_weight = None
    if mask[0] and transposed:
        to_value = aten.convolution.default(grad, weight, None, stride, padding, dilation, False, zeros, groups)
    elif mask[0]:
        most = [step - 1 for step in stride]
        to_value = aten.convolution.default(grad, weight, None, stride, padding, dilation, True, most, groups)
        for axis in (axis for axis in axes if stride[axis - 2] > 1):
            to_value = aten.slice.Tensor(to_value, axis, 0, value.shape[axis])
    if mask[1]:
        large, small = (grad, value) if transposed else (value, grad)
        rows, channels, *sizes = large.shape
        parted = aten.reshape.default(large, [rows, groups, channels // groups, *sizes])
        order = [2, 1, 0, *range(3, parted.dim())]
        large = aten.reshape.default(aten.permute.default(parted, order), [channels // groups, groups * rows, *sizes])
        small = aten.transpose.int(small, 0, 1)
        found = aten.convolution.default(large, small, None, dilation, padding, stride, False, zeros, groups)
        for axis in axes:
            found = aten.slice.Tensor(found, axis, 0, weight.shape[axis])
        to_weight = aten.transpose.int(found, 0, 1)
    return to_value, to_weight, aten.sum.dim_IntList(grad, [0, *axes]) if mask[2] else None


def _average(function: Any) -> Form:
    """Return the form of a mean over windows, of which torch's exporter would leave out `divisor_override`."""

    def form(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 6 and args[6] is not None:
            raise NoForm("with `divisor_override`. Multiply its result instead")
        return function(*args, **kwargs)

    return form


Window = tuple[int, int, int]
"""First place of a window, the one behind its last, and what their sum is divided by."""


def _spread(grad: Tensor, value: Tensor, windows: Sequence[Callable[[int, int, int], Window]]) -> Tensor:
    """Return the gradient of means over windows, along each of the last axes by a matrix of these.

    `windows` return one of its number, of the size of the axis, and of that of the result.
    """
    for axis, window in enumerate(windows, value.dim() - len(windows)):
        size, count = value.shape[axis], grad.shape[axis]
        if not isinstance(size, int) or not isinstance(count, int):
            raise NoForm("of sizes that vary along its windows. Export it with fixed ones")
        matrix = [[0.0] * size for _ in range(count)]
        for index, row in enumerate(matrix):
            start, end, divisor = window(index, size, count)
            row[start:end] = [1.0 / divisor] * (end - start)
        turned = aten.transpose.int(grad, axis, -1)
        grad = aten.transpose.int(aten.matmul.default(turned, torch.tensor(matrix, dtype=grad.dtype)), axis, -1)
    return grad


def _average_backward(
    grad: Tensor,
    value: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    *rest: Any,
) -> Tensor:
    def windows(kernel: int, stride: int, padding: int) -> Callable[[int, int, int], Window]:
        def window(index: int, size: int, count: int) -> Window:
            start = index * stride - padding
            end = min(start + kernel, size + padding)
            own = max(start, 0), min(end, size)
            return *own, end - start if count_include_pad else own[1] - own[0]

        return window

    return _spread(grad, value, [*map(windows, kernel, stride or kernel, padding)])


def _adaptive_backward(axes: int) -> Form:
    """Return the form of the gradient of means over the windows that divide the last axes."""

    def window(index: int, size: int, count: int) -> Window:
        start, end = index * size // count, -(-(index + 1) * size // count)
        return start, end, end - start

    return lambda grad, value: _spread(grad, value, [window] * axes)


def _cumulative_product(value: Tensor, axis: int, dtype: Any = None) -> Tensor:
    """Return products of all values up to each, by those of twice as many at a time: ONNX has none."""
    value = value if dtype is None else aten._to_copy.default(value, dtype=dtype)
    size, reach = value.shape[axis] if value.dim() else 1, 1
    if not isinstance(size, int):
        raise NoForm("along a size that varies. Export it with a fixed one")
    while reach < size:
        kept, before, rest = (
            aten.slice.Tensor(value, axis, *part) for part in ((0, reach), (0, size - reach), (reach, size))
        )
        value, reach = aten.cat.default([kept, before * rest], axis), 2 * reach
    return value


def _cross_entropy(value: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """Return a cross entropy with classes as targets, the only one that torch's exporter translates correctly."""
    if (len(rest) > 3 and rest[3] != 0) or target.is_floating_point():
        raise NoForm("with `label_smoothing`, or targets that are probabilities. Compute it from `log_softmax`")
    return aten.cross_entropy_loss.default(value, target, *rest)


def _masked_select(value: Tensor, mask: Tensor) -> Tensor:
    value, mask = aten.broadcast_tensors.default([value, mask])
    return aten.index.Tensor(value, [mask])


def _extreme(function: Any) -> Form:
    """Return the form of a maximum or minimum, with explicit axes, which torch's exporter requires."""

    def form(value: Tensor, axes: Sequence[int] = (), *keep: Any, **kwargs: Any) -> Tensor:
        if not value.dim():
            return aten.clone.default(value)
        return function(value, axes or list(range(value.dim())), *keep, **kwargs)

    return form


def _softmax(function: Any) -> Form:
    """Return the form of a softmax that is computed in its `dtype`; torch's exporter would convert afterwards."""
    return lambda value, axis, dtype=None: function(
        value if dtype is None else aten._to_copy.default(value, dtype=dtype), axis
    )


def _columns(
    value: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return sliding blocks as columns; ONNX Script leaves a size to be computed, which fails where another is 0."""
    if any(padding):
        value = aten.constant_pad_nd.default(value, [padding[1], padding[1], padding[0], padding[0]])
    *batch, channels = value.shape[:-2]
    counts: list[Any] = []
    for axis in (0, 1):
        counts.append((value.shape[axis - 2] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1)
        places = torch.arange(kernel[axis])[:, None] * dilation[axis] + torch.arange(counts[axis]) * stride[axis]
        value = aten.index_select.default(value, axis - 2, places.flatten())
    blocks = value.reshape([*batch, channels, kernel[0], counts[0], kernel[1], counts[1]]).transpose(-3, -2)
    return blocks.reshape([*batch, channels * kernel[0] * kernel[1], counts[0] * counts[1]])


FORMS: dict[str, Form] = {
    # Forms give results in an order of memory of their own, and ONNX knows none.
    "aten::view.default": aten.reshape.default,
    "aten::scaled_dot_product_attention.default": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu.default": _attention_with_sums,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten::batch_norm.default": _batch_norm,
    # Torch's exporter keeps these two whole, and knows neither.
    "aten::silu_backward.default": silu_backward,
    "aten::mish_backward.default": mish_backward,
    # It would not train, and invents what backward divides by.
    "aten::nll_loss_forward.default": nll_loss,
    "aten::_native_batch_norm_legit_functional.default": partial(batch_norm, functional=True),
    "aten::_native_batch_norm_legit.no_stats": lambda value, weight, bias, *rest: batch_norm(
        value, weight, bias, None, None, *rest, functional=True
    )[:3],
    # ONNX Script computes both of its forms, whatever the weight.
    "aten::lerp_.Scalar": lambda start, end, weight: (
        start.add_(aten.sub.Tensor(end, start), alpha=weight) if 0 <= weight < 0.5 else start.lerp_(end, weight)
    ),
    "aten::im2col.default": _columns,
    "aten::mv.default": _matmul,
    "aten::matmul.default": _matmul,
    # ONNX's sorts are stable.
    "aten::sort.stable": lambda *args, stable=None, **kwargs: aten.sort.default(*args, **kwargs),
    "aten::masked_select.default": _masked_select,
    "aten::scatter_reduce.two": _scatter_reduce,
    "aten::avg_pool2d.default": _average(aten.avg_pool2d.default),
    "aten::avg_pool3d.default": _average(aten.avg_pool3d.default),
    "aten::avg_pool2d_backward.default": _average_backward,
    "aten::avg_pool3d_backward.default": _average_backward,
    "aten::_adaptive_avg_pool2d_backward.default": _adaptive_backward(2),
    "aten::cumprod.default": _cumulative_product,
    "aten::convolution_backward.default": _convolution_backward,
    "aten::cross_entropy_loss.default": _cross_entropy,
    "aten::amax.default": _extreme(aten.amax.default),
    "aten::amin.default": _extreme(aten.amin.default),
    # The data determine the size of the result, whatever `output_size` says.
    "aten::repeat_interleave.Tensor": lambda repeats, **_: aten.repeat_interleave.Tensor(repeats),
    "aten::softmax.int": _softmax(aten.softmax.int),
    "aten::log_softmax.int": _softmax(aten.log_softmax.int),
}
"""Forms by operator; that of `as_strided` also takes metadata."""
