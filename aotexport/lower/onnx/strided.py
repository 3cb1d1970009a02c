"""Views of any strides, of an operand whose elements can be put in the order of its memory: ONNX knows no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from aotexport.lower.onnx.form import Call, Metas, NoForm
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values.sizes import UNDEFINED, evaluate, symbols_of

aten = torch.ops.aten


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
    """Return the axes along which a tensor repeats its memory, and the order of the other axes in memory.

    The others are counted without the repeating ones.

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
