"""Operators that torch's exporter or ONNX Runtime do not support as they are, in forms that they support."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values.sizes import UNDEFINED, evaluate, symbols_of

Call = Callable[..., fx.Node]
"""Adds a call of a function to a graph; returns its node."""

Metas = Sequence[TensorMeta | None]
"""Metadata per positional argument; None: it is no tensor."""

Form = Callable[[Call, list[Any], Mapping[str, Any], Metas], Any]
"""Adds nodes to a graph that compute an operator on arguments; returns its node, or a node per result. May raise
`NoForm`."""


class NoForm(Exception):
    """An operator has no form for these arguments; says why."""


def as_strided(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a strided view of an operand, after a permutation to the order of its memory."""
    value = args[0]
    assert metas[0] is not None
    repeated, order = _memory(metas[0])
    for axis in reversed(repeated):
        value = call(aten.select.int, value, axis, 0)
    if order != sorted(order):
        value = call(aten.permute.default, value, order)
    return call(aten.as_strided.default, value, *args[1:], **kwargs)


def _memory(meta: TensorMeta) -> tuple[list[int], list[int]]:
    """Return the axes along which a tensor repeats its memory, and the order of the others, counted without these.

    Raises:
        NoForm: there are gaps in its memory, or other overlaps.
    """
    found = {repr(_layout(meta, base)): _layout(meta, base) for base in (5, 11)}
    layout = next(iter(found.values())) if len(found) == 1 else None
    if layout is None:
        raise NoForm("the operand's memory has gaps, and ONNX knows none. Make it contiguous first")
    return layout


def _layout(meta: TensorMeta, base: int) -> tuple[list[int], list[int]] | None:
    """Return the result of `_memory`, for symbols with values from `base` on; None: there are gaps."""
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


def batch_norm(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a batch normalisation; in training by single steps, which also write the running statistics."""
    value, weight, bias, running_mean, running_var, training, momentum, eps, _ = args
    if not training:
        return call(aten.batch_norm.default, *args, **kwargs)
    meta = metas[0]
    assert meta is not None
    narrow = meta.dtype in ("float16", "bfloat16")
    wide = call(aten._to_copy.default, value, dtype=torch.float32) if narrow else value
    axes = [axis for axis in range(len(meta.shape)) if axis != 1]
    mean = call(aten.mean.dim, wide, axes, True)
    centered = call(aten.sub.Tensor, wide, mean)
    variance = call(aten.mean.dim, call(aten.mul.Tensor, centered, centered), axes, True)
    result = call(aten.mul.Tensor, centered, call(aten.rsqrt.default, call(aten.add.Scalar, variance, eps)))
    for function, factor in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if factor is not None:
            result = call(function, result, call(aten.reshape.default, factor, [-1] + [1] * (len(axes) - 1)))
    if running_mean is not None:
        seen = (mean, call(aten.var.correction, wide, axes, correction=1))
        for running, batch in zip((running_mean, running_var), seen, strict=True):
            previous = call(aten.mul.Scalar, running, 1 - momentum)
            new = call(aten.mul.Scalar, call(aten.reshape.default, batch, [-1]), momentum)
            call(aten.copy_.default, running, call(aten.add.Tensor, previous, new))
    return call(aten._to_copy.default, result, dtype=getattr(torch, meta.dtype)) if narrow else result


aten = torch.ops.aten


def _attention(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return attention in four axes, all that torch's exporter translates; 0 where a mask hides a whole row."""
    missing = 4 - _rank(metas[0])
    for _ in range(missing):
        args = [*(call(aten.unsqueeze.default, value, 0) for value in args[:3]), *args[3:]]
    result = call(aten.scaled_dot_product_attention.default, *args, **kwargs)
    mask = metas[3] if len(metas) > 3 else None
    if mask is not None:
        seen = args[3] if mask.dtype == "bool" else call(aten.gt.Scalar, args[3], -math.inf)
        result = call(aten.where.ScalarOther, call(aten.any.dim, seen, -1, True), result, 0.0)
    for _ in range(missing):
        result = call(aten.squeeze.dim, result, 0)
    return result


def _matmul(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a matmul by a vector as one by a matrix of one row or column.

    An optimisation of ONNX Runtime (1.31, `MatmulTransposeFusion`) loses the transposition of the other operand.
    """
    left, right = args
    if _rank(metas[0]) == 1 != _rank(metas[1]):
        return call(aten.squeeze.dim, call(aten.matmul.default, call(aten.unsqueeze.default, left, 0), right), -2)
    if _rank(metas[1]) == 1 != _rank(metas[0]):
        return call(aten.squeeze.dim, call(aten.matmul.default, left, call(aten.unsqueeze.default, right, 1)), -1)
    return call(aten.matmul.default, left, right)


def _sort(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a sort without the option `stable`: ONNX's sorts are stable."""
    return call(aten.sort.default, *args, **{name: value for name, value in kwargs.items() if name != "stable"})


def _masked_select(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return the elements at which a mask is true."""
    both = call(aten.broadcast_tensors.default, args)
    value, mask = (call(operator.getitem, both, index) for index in (0, 1))
    return call(aten.index.Tensor, value, [mask])


def _extreme(function: Any) -> Form:
    """Return the form of a maximum or minimum, with explicit axes, which torch's exporter requires."""

    def form(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
        value, axes, *keep = args + [[]] * (len(args) == 1)
        if not _rank(metas[0]):
            return call(aten.clone.default, value)
        return call(function, value, axes or list(range(_rank(metas[0]))), *keep, **kwargs)

    return form


def _roll(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a roll; one by dynamic shifts, which torch's exporter does not support, is joined from pieces."""
    value, shifts, axes = args[0], args[1], args[2] if len(args) > 2 else []
    if not any(isinstance(shift, fx.Node) for shift in shifts):
        return call(aten.roll.default, *args, **kwargs)
    if len(axes) != len(shifts):
        raise NoForm("its shift is a dynamic size and it names no axis. Flatten first, and roll along axis 0")
    for shift, axis in zip(shifts, axes, strict=True):
        size = call(aten.sym_size.int, value, axis)
        begin = call(operator.sub, size, call(operator.mod, shift, size))
        pieces = [call(aten.slice.Tensor, value, axis, *ends) for ends in ((begin, 1 << 62), (0, begin))]
        value = call(aten.cat.default, pieces, axis)
    return value


def _with_axes(function: Any, like: int = 0) -> Form:
    """Return the form of an operator along an axis for operands without axes, which ONNX does not allow.

    The operand at position `like` has as many axes as the result.
    """

    def form(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> Any:
        bare = [meta is not None and not meta.shape for meta in metas]
        if not any(bare):
            return call(function, *args, **kwargs)
        args = [call(aten.unsqueeze.default, a, 0) if one else a for a, one in zip(args, bare, strict=True)]
        result = call(function, *args, **kwargs)
        if not bare[like]:
            return result
        if len(function._schema.returns) == 1:
            return call(aten.squeeze.dim, result, 0)
        parts = [call(operator.getitem, result, index) for index in range(len(function._schema.returns))]
        return tuple(call(aten.squeeze.dim, part, 0) for part in parts)

    return form


def _scatter_reduce(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> Any:
    """Return a scatter with a mean as one with a sum, divided by a count: ONNX has no mean."""
    form = _with_axes(aten.scatter_reduce.two)
    value, axis, index, source, reduce = args
    if reduce != "mean":
        return form(call, args, kwargs, metas)
    assert metas[0] is not None
    if not metas[0].dtype.startswith(("float", "bfloat")):
        raise NoForm("the mean of integers is rounded. Convert them first")
    total = form(call, [value, axis, index, source, "sum"], kwargs, metas)
    ones = [call(aten.ones_like.default, one) for one in (value, source)]
    count = form(call, [ones[0], axis, index, ones[1], "sum"], kwargs, metas)
    return call(aten.div.Tensor, total, count)


def _repeat_interleave(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return the repeated indices; the data determine the size of the result."""
    return call(aten.repeat_interleave.Tensor, *args)


def _softmax(function: Any) -> Form:
    """Return the form of a softmax that is computed in its `dtype`; torch's exporter would convert afterwards."""

    def form(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
        value, axis, dtype = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dtype")
        return call(function, value if dtype is None else call(aten._to_copy.default, value, dtype=dtype), axis)

    return form


def _average(function: Any) -> Form:
    """Return the form of an average pooling."""

    def form(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
        if len(args) > 6 and args[6] is not None:
            raise NoForm("with `divisor_override`. Multiply its result instead")
        return call(function, *args, **kwargs)

    return form


def _pad(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a padded tensor; circular borders are joined from pieces, since ONNX Runtime has no kernel for them."""
    value, widths, mode = args[0], args[1], args[2] if len(args) > 2 else "constant"
    if mode != "circular":
        return call(aten.pad.default, *args, **kwargs)
    rank = _rank(metas[0])
    for index in range(0, len(widths), 2):
        before, after, axis = widths[index], widths[index + 1], rank - 1 - index // 2
        if not (isinstance(before, int) and isinstance(after, int) and min(before, after) >= 0):
            raise NoForm("with circular borders of negative or dynamic width")
        pieces = [call(aten.slice.Tensor, value, axis, -before, 1 << 62)] if before else []
        pieces += [value] + ([call(aten.slice.Tensor, value, axis, 0, after)] if after else [])
        value = call(aten.cat.default, pieces, axis)
    return value


def _cross_entropy(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a cross entropy with classes as targets, the only one that torch's exporter translates correctly."""
    smoothed = len(args) > 5 and args[5] != 0
    if smoothed or metas[1] is None or not metas[1].dtype.startswith(("int", "uint")):
        raise NoForm("with `label_smoothing`, or targets that are probabilities. Compute it from `log_softmax`")
    return call(aten.cross_entropy_loss.default, *args, **kwargs)


def _search_sorted(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return for each value the number of boundaries below it, or with `right` also equal to it."""
    boundaries, values, as_int32, right = args + [False] * (4 - len(args))
    as_int32, right = kwargs.get("out_int32", as_int32), kwargs.get("right", right)
    if kwargs.get("side") is not None or kwargs.get("sorter") is not None:
        raise NoForm("with `side` or `sorter`. Use `right`, and sort the boundaries first")
    compare = aten.le.Tensor if right else aten.lt.Tensor
    below = call(compare, call(aten.unsqueeze.default, boundaries, -2), call(aten.unsqueeze.default, values, -1))
    return call(aten.sum.dim_IntList, below, [-1], dtype=torch.int32 if as_int32 else torch.int64)


def _rank(meta: TensorMeta | None) -> int:
    assert meta is not None
    return len(meta.shape)


FORMS: dict[str, Form] = {
    "aten::scaled_dot_product_attention.default": _attention,
    "aten::batch_norm.default": batch_norm,
    "aten::mv.default": _matmul,
    "aten::matmul.default": _matmul,
    "aten::sort.stable": _sort,
    "aten::masked_select.default": _masked_select,
    "aten::amax.default": _extreme(aten.amax.default),
    "aten::amin.default": _extreme(aten.amin.default),
    "aten::as_strided.default": as_strided,
    "aten::roll.default": _roll,
    "aten::gather.default": _with_axes(aten.gather.default, like=2),
    "aten::scatter.src": _with_axes(aten.scatter.src),
    "aten::scatter.value": _with_axes(aten.scatter.value),
    "aten::scatter_add.default": _with_axes(aten.scatter_add.default),
    "aten::scatter_reduce.two": _scatter_reduce,
    "aten::topk.default": _with_axes(aten.topk.default),
    "aten::prod.dim_int": _with_axes(aten.prod.dim_int),
    "aten::repeat_interleave.Tensor": _repeat_interleave,
    "aten::pad.default": _pad,
    "aten::cross_entropy_loss.default": _cross_entropy,
    "aten::softmax.int": _softmax(aten.softmax.int),
    "aten::log_softmax.int": _softmax(aten.log_softmax.int),
    "aten::avg_pool2d.default": _average(aten.avg_pool2d.default),
    "aten::avg_pool3d.default": _average(aten.avg_pool3d.default),
    "aten::searchsorted.Tensor": _search_sorted,
}
"""Forms by operator."""
