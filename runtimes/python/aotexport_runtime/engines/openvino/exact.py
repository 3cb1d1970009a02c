"""Where OpenVINO computes otherwise than the model says: wide numbers, integers of other widths, and indices.

Its plugin for processors has no float64 and no int64. It computes integers in 32 bits or in float32, and keeps those of
fewer bits in their range where eager wraps around. Not all of its operators check indices, and a model with one that
does is not to be called again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST = 1 << 20
"""Least integer that is refused as an argument."""

_EXACT_BITS = 24
"""Bits of integers that float32 has too."""

_SUM_BITS = 16
"""Bits that a sum may add: it is one of at most 65,536 integers."""

_WIDTHS = {"i8": 7, "u8": 8, "i16": 15, "u16": 16, "i32": _EXACT_BITS, "u32": _EXACT_BITS, "i64": _EXACT_BITS}
_WIDTHS["u64"] = _EXACT_BITS

_MOVES_FIRST = {
    *(
        "Identity",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Broadcast",
        "Tile",
        "Slice",
        "StridedSlice",
        "Split",
    ),
    *("VariadicSplit", "Gather", "GatherElements", "GatherND", "ReduceMax", "ReduceMin", "Clamp", "Abs", "Reverse"),
    *("ReverseSequence", "Roll", "TopK", "Negative", "DepthToSpace", "SpaceToDepth"),
}
"""Operators whose integers are no larger than those of the first input."""

_MOVES_ALL = {
    *("Concat", "Select", "Minimum", "Maximum", "ScatterElementsUpdate", "ScatterNDUpdate", "ScatterUpdate", "Pad"),
}
"""The same of all inputs."""

_BY_SIZES = {"NonZero", "Range", "ShapeOf"}
"""Operators whose integers are sizes, or less than sizes."""

_BODIES = {"If", "Loop", "TensorIterator"}


def why_inexact(model: Any) -> str | None:
    """Return why OpenVINO may compute other numbers than the model says; None: it does not.

    Args:
        model: an `openvino.Model`, as read.
    """
    bits: dict[tuple[str, int], int] = {}
    for op in model.get_ordered_ops():
        kind = op.get_type_name()
        if kind in _BODIES:
            return f"it has a branch or a loop (`{kind}`), whose indices and integers are not checked"
        if kind in ("Constant", "ShapeOf", "Result"):
            continue
        sources = [(s.get_node().get_friendly_name(), s.get_index(), s.get_node()) for s in op.input_values()]
        if kind != "Parameter" and not any((name, index) in bits for name, index, _ in sources):
            continue
        inputs = [bits.get((name, index), _of_constant(node)) for name, index, node in sources]
        for index, output in enumerate(op.outputs()):
            if not output.get_target_inputs():
                continue
            dtype = output.element_type.get_type_name()
            if dtype in ("f64", "bf16") or dtype.startswith("f8"):
                return f"it computes in {dtype}, and OpenVINO in another dtype"
            found = _bits_of(kind, dtype, op, inputs) if dtype in _WIDTHS else 0
            if found is None or found > _WIDTHS.get(dtype, _EXACT_BITS):
                return f"it computes integers ({dtype}) by `{kind}`, which OpenVINO does with fewer bits than eager"
            bits[op.get_friendly_name(), index] = found
        if any(value > _EXACT_BITS for value in inputs) and kind not in _MOVES_FIRST:
            return f"it compares or adds integers (`{kind}`) of more bits than OpenVINO has"
    return None


def _of_constant(node: Any) -> int:
    """Return the bits of the largest integer of a constant; those of sizes fit."""
    if node.get_type_name() != "Constant" or node.output(0).element_type.get_type_name() not in _WIDTHS:
        return 0
    values = node.data
    return max(int(values.max()).bit_length(), int(values.min()).bit_length()) if values.size else 0


def _bits_of(kind: str, dtype: str, op: Any, inputs: Sequence[int]) -> int | None:
    """Return the bits of an operator's integers, given those of its inputs; None: nobody knows."""
    if kind == "Parameter":
        return min(_WIDTHS[dtype], LARGEST.bit_length() - 1)
    if kind in ("Subtract", "Negative") and dtype.startswith("u"):
        return None
    if kind == "Convert":
        source = op.input(0).get_element_type().get_type_name()
        return 1 if source == "boolean" else inputs[0] if source in _WIDTHS else None
    if kind == "TopK" and inputs[0] == 0:
        return LARGEST.bit_length() - 1
    if kind in _BY_SIZES:
        return LARGEST.bit_length() - 1
    if kind in _MOVES_FIRST:
        return inputs[0]
    if kind in _MOVES_ALL:
        return max(inputs)
    if kind in ("Add", "Subtract"):
        return max(inputs) + 1
    if kind == "Multiply":
        return sum(inputs)
    if kind in ("CumSum", "ReduceSum"):
        return inputs[0] + _SUM_BITS
    return None


def indices_in_bounds(model: Any) -> bool:
    """Add an output to a model that says whether all indices are in bounds, as ONNX defines them; others become 0.

    Args:
        model: an `openvino.Model`, as read; changed.

    Returns:
        Whether it has indices that are no constants; without any it is left as it is.
    """
    from openvino import opset13 as ops

    holds = [check for op in model.get_ordered_ops() for check in _checks(op, ops)]
    if not holds:
        return False
    whole = holds[0]
    for other in holds[1:]:
        whole = ops.logical_and(whole, other)
    model.add_results([ops.result(whole)])
    return True


def _checks(op: Any, ops: Any) -> list[Any]:
    """Return truths of an operator's indices being in bounds."""
    kind = op.get_type_name()
    if kind not in (
        "Gather",
        "GatherElements",
        "GatherND",
        "ScatterElementsUpdate",
        "ScatterNDUpdate",
        "ScatterUpdate",
    ):
        return []
    data, indices = op.input_value(0), op.input_value(1)
    if indices.get_node().get_type_name() == "Constant":
        return []
    sizes = ops.shape_of(data, "i64")
    if kind.endswith(("ND", "NDUpdate")):
        first = op.get_attributes().get("batch_dims", 0)
        depth = indices.get_partial_shape()[-1].get_length()
        size = ops.gather(sizes, _constant(ops, range(first, first + depth)), _constant(ops, 0))
    else:
        rank = len(data.get_partial_shape())
        axis = op.get_attributes().get("axis") if kind == "GatherElements" else _axis(op)
        size = ops.gather(sizes, _constant(ops, axis % rank), _constant(ops, 0))
    wide = ops.convert(indices, "i64")
    inside = ops.logical_and(ops.less(wide, size), ops.greater_equal(wide, ops.negative(size)))
    axes = _constant(ops, range(len(indices.get_partial_shape())))
    zero = ops.convert(_constant(ops, 0), indices.get_element_type())
    op.input(1).replace_source_output(ops.select(inside, indices, zero).output(0))
    return [ops.reduce_logical_and(inside, axes, False)]


def _axis(op: Any) -> int:
    return int(op.input_value(2 if op.get_type_name() == "Gather" else 3).get_node().data)


def _constant(ops: Any, value: Any) -> Any:
    return ops.constant(np.array(value, np.int64))
