"""Where OpenVINO computes otherwise than the model says: wide numbers, integers, and indices.

Its plugin for processors has no float64 and no int64. It computes integers in 32 bits or in float32, and keeps those of
fewer bits in their range where eager wraps around. Not all of its operators check indices, and a model with one that
does is not to be called again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LARGEST = 1 << 24
"""Least integer that float32 may round; none of that size is taken."""

_INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
_INDEXED = {"Gather": 2, "GatherElements": 0, "GatherND": 0, "ScatterElementsUpdate": 3, "ScatterNDUpdate": 0}
_INDEXED["ScatterUpdate"] = 3
"""Operators with indices as second input, and the input that says their axis; 0: an attribute, or none."""

_SLICES = {
    *("Reshape", "Squeeze", "Unsqueeze", "Broadcast", "Tile", "Slice", "StridedSlice", "Split", "VariadicSplit"),
    *("Transpose", "TopK"),
}
"""Operators whose other inputs than the first are sizes and places."""

_MOVES = {
    *_SLICES,
    *("Parameter", "Identity", "Concat", "Select", "Gather", "GatherElements", "GatherND", "ScatterElementsUpdate"),
    *("ScatterNDUpdate", "ScatterUpdate", "ReduceMax", "ReduceMin", "Minimum", "Maximum", "Reverse", "Roll", "Pad"),
    *("ReverseSequence", "NonZero", "Range"),
}
"""Operators that compute no integers other than those of their inputs, and sizes."""


def why_inexact(model: Any) -> str | None:
    """Return why OpenVINO may compute other numbers than the model says; None: it does not.

    Args:
        model: an `openvino.Model`, as read.
    """
    given: set[tuple[str, int]] = set()  # Outputs that depend on values of arguments, not on their sizes alone.
    for op in model.get_ordered_ops():
        kind, sources = op.get_type_name(), op.input_values()
        if kind in ("If", "Loop", "TensorIterator"):
            return f"it has a branch or a loop (`{kind}`), whose indices and integers are not checked"
        depends = kind == "Parameter" or any(
            (s.get_node().get_friendly_name(), s.get_index()) in given for s in sources
        )
        if not depends or kind in ("ShapeOf", "Result"):
            continue
        if any(map(_is_large, sources[:1] if kind in _SLICES else sources)):
            return (
                f"it has integers of {LARGEST:,} or more (`{kind}`), and OpenVINO computes with fewer bits than eager"
            )
        for output in (each for each in op.outputs() if each.get_target_inputs()):
            dtype = output.element_type.get_type_name()
            if dtype in ("f64", "bf16") or dtype.startswith("f8"):
                return f"it computes in {dtype}, and OpenVINO in another dtype"
            if dtype in _INTEGERS and kind not in _MOVES and not _widens(op, dtype):
                return f"it computes integers ({dtype}) by `{kind}`, which OpenVINO does with fewer bits than eager"
            given.add((op.get_friendly_name(), output.get_index()))
    return None


def _is_large(source: Any) -> bool:
    """Return whether an input is a constant with an integer of more bits than OpenVINO has."""
    node = source.get_node()
    if node.get_type_name() != "Constant" or source.get_element_type().get_type_name() not in _INTEGERS:
        return False
    return node.data.size > 0 and bool(node.data.max() >= LARGEST or node.data.min() <= -LARGEST)


def _widens(op: Any, dtype: str) -> bool:
    """Return whether an operator converts truths or integers to integers of as many bits or of 32 and more."""
    source = op.input_value(0).get_element_type().get_type_name() if op.get_type_name() == "Convert" else ""
    return source == "boolean" or (source in _INTEGERS and dtype in (source, "i32", "i64"))


def indices_in_bounds(model: Any) -> bool:
    """Add an output to a model that says whether all indices are in bounds, as ONNX defines them; others become 0.

    Args:
        model: an `openvino.Model`, as read; changed.

    Returns:
        Whether it has indices that are no constants; without any it is left as it is.
    """
    from openvino import opset13 as ops

    indexed = [op for op in model.get_ordered_ops() if op.get_type_name() in _INDEXED]
    holds = [_checked(op, ops) for op in indexed if op.input_value(1).get_node().get_type_name() != "Constant"]
    if not holds:
        return False
    whole = holds[0]
    for other in holds[1:]:
        whole = ops.logical_and(whole, other)
    model.add_results([ops.result(whole)])
    return True


def _checked(op: Any, ops: Any) -> Any:
    """Return the truth that an operator's indices are in bounds; replace others by 0."""
    kind, data, indices = op.get_type_name(), op.input_value(0), op.input_value(1)
    if kind.endswith(("ND", "NDUpdate")):
        first = op.get_attributes().get("batch_dims", 0)
        axes = range(first, first + indices.get_partial_shape()[-1].get_length())
    elif _INDEXED[kind]:
        axes = int(op.input_value(_INDEXED[kind]).get_node().data) % len(data.get_partial_shape())
    else:
        axes = op.get_attributes()["axis"] % len(data.get_partial_shape())
    size = ops.gather(ops.shape_of(data, "i64"), _constant(ops, axes), _constant(ops, 0))
    wide = ops.convert(indices, "i64")
    inside = ops.logical_and(ops.less(wide, size), ops.greater_equal(wide, ops.negative(size)))
    zero = ops.convert(_constant(ops, 0), indices.get_element_type())
    op.input(1).replace_source_output(ops.select(inside, indices, zero).output(0))
    return ops.reduce_logical_and(inside, _constant(ops, range(len(indices.get_partial_shape()))), False)


def _constant(ops: Any, value: Any) -> Any:
    return ops.constant(np.array(value, np.int64))
