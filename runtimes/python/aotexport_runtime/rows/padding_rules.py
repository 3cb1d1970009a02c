"""What kinds of operators do with padding of their operands; `operators.txt` says which are of which kind.

A rule raises `Dependent` unless each step of the call is computed from the steps of the call, or from padding that does
not matter; it says where the result has the length, and what its padding is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aotexport_runtime.rows.padded import LOW, Number, Padded, PaddedCall, Place, folded, throughout
from aotexport_runtime.rows.rules import Dependent, Operand, Rows, named_axes, reshaped

UNKNOWN = "is not known to keep padding apart"


def _refuse(operand: Operand[Padded], axes: Iterable[int]) -> None:
    """Refuse a call that computes along `axes` of an operand where they have the length."""
    for rows, fill in operand.rows.places:
        if rows.axis in axes:
            padding = "may be any number" if fill is None else f"is {fill:g}"
            raise Dependent(f"computes along axis {rows.axis} of `{operand.parameter}`, where padding {padding}")


def _united(places: Iterable[Place]) -> Iterator[Place]:
    """Yield a place per axis, on which operands have the steps in one order; padding of unknown numbers."""
    found = {replace(rows, numbered=False) for rows, _ in places}
    if len({rows.axis for rows in found}) < len(found):
        raise Dependent("has the steps of its operands in different orders")
    return map(Place, found)


def _shifted(operand: Operand[Padded], by: int) -> Iterator[Place]:
    return (Place(replace(rows, axis=rows.axis + by), fill) for rows, fill in operand.rows.places)


def _aligned(call: PaddedCall) -> Iterator[Place]:
    """Operands are broadcast to one another."""
    if call.trailing or call.name == "stack" or call.arguments.get("train"):
        raise Dependent(UNKNOWN)
    moved = [[*_shifted(each, len(call.shape) - len(each.shape))] for each in call.operands]
    numbered = [rows.axis for places in moved for rows, _ in places if rows.numbered]
    is_order = call.name in ("lt", "le", "gt", "ge") and len({*numbered}) == len(moved) == 2
    for rows, _ in _united(place for places in moved for place in places):
        fill = folded(call, partial(_number_at, from_end=rows.axis - len(call.shape)))
        if is_order and rows.axis in numbered:  # Padded steps have greater numbers than those of the call.
            fill = float((rows.axis == numbered[0]) == (call.name in ("gt", "ge")))
        is_numbered = call.name == "add" and call.arguments["other"] == 0 and numbered == [rows.axis]
        yield Place(replace(rows, numbered=is_numbered), fill)


def _number_at(operand: Operand[Padded], from_end: int) -> Number:
    """Return what an operand is at padded steps of an axis; where it has one entry for all steps, what it is there."""
    fills = [fill for rows, fill in operand.rows.places if rows.axis - len(operand.shape) == from_end]
    return fills[0] if fills else operand.rows.value


def _first(call: PaddedCall) -> Iterator[Place]:
    """Only the first operand may have the length; each step is computed along the last axes."""
    first, *others = call.operands
    trailing = call.trailing or len(call.arguments.get("normalized_shape", ()))
    _refuse(first, range(len(first.shape) - trailing, len(first.shape)))
    for other in others:
        _refuse(other, range(len(other.shape)))
    return _united(first.rows.places)


def _embedded(call: PaddedCall) -> Iterator[Place]:
    table, indices = call.operands
    _refuse(table, range(2))
    return _united(indices.rows.places)


_NEUTRAL = {
    **dict.fromkeys(("sum", "any"), 0.0),
    "all": 1.0,
    **dict.fromkeys(("amax", "max", "argmax", "logsumexp", "softmax", "_softmax"), -math.inf),
}
"""What padding has to be where an operator computes along the length; -inf: at most `LOW`."""

_OF_PREFIXES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
_MOVES = ("select", "split", "split_with_sizes", "chunk", "unbind", "narrow")


def _along(call: PaddedCall) -> Iterator[Place]:
    """Computes along axes that it names; of all, where it names none."""
    found: list[Place] = []
    for operand in call.operands:
        rank, along = len(operand.shape), named_axes(call.arguments, len(operand.shape))
        for rows, fill in operand.rows.places:
            axis = rows.axis - (sum(each < rows.axis for each in along) if len(call.shape) < rank else 0)
            if rows.axis not in along:
                found.append(Place(replace(rows, axis=axis), fill if call.name in _MOVES else None))
            elif not _is_harmless(call, rows, fill):
                _refuse(operand, [rows.axis])
            elif len(call.shape) == rank and call.shape[axis] == operand.shape[axis]:
                found.append(Place(rows, 0.0 if call.name.endswith("softmax") else None))
    fills = {place.rows.axis: place.fill for place in found} if len(call.operands) == 1 else {}
    return (Place(rows, fills.get(rows.axis)) for rows, _ in _united(found))


def _is_harmless(call: PaddedCall, rows: Rows, fill: Number) -> bool:
    """Return whether an operator that computes along the length takes steps of the call, or padding that is neutral."""
    neutral, index = _NEUTRAL.get(call.name), call.arguments.get("index")
    if call.name == "select":
        return isinstance(index, int) and index >= 0 and (rows.before, rows.after) == (1, 1)
    if call.name in _OF_PREFIXES:
        return rows.before == 1
    return fill is not None and (fill <= LOW if neutral == -math.inf else fill == neutral)


def _triangle(call: PaddedCall) -> Iterator[Place]:
    """Of two last axes with the length, what is above or below the diagonal becomes 0."""
    places, rank = call.operands[0].rows.places, len(call.shape)
    is_low, diagonal = call.name == "tril", call.arguments["diagonal"]
    if [rows.axis for rows, _ in places] != [rank - 2, rank - 1] or is_low != (diagonal <= 0):
        raise Dependent(UNKNOWN)
    yield Place(places[0].rows, None if is_low else 0.0)
    yield Place(places[1].rows, 0.0 if is_low else places[1].fill)


_Labelled = Sequence[tuple[Operand[Padded], Sequence[Any]]]
"""Operands with a label per axis."""


def _multiplied(labelled: _Labelled, result: Sequence[Any]) -> Iterator[Place]:
    """Multiply entries of one label each, and sum over the labels that the result has not, where one factor is 0."""
    zeros = {labels[place.rows.axis] for op, labels in labelled for place in op.rows.places if place.fill == 0}
    return _summed(labelled, result, zeros)


def _summed(labelled: _Labelled, result: Sequence[Any], harmless: Iterable[Any]) -> Iterator[Place]:
    """Compute each label of the result by itself, and along the others only if they are harmless."""
    order = [*dict.fromkeys([*result, *(label for _, labels in labelled for label in labels)])]
    for operand, labels in labelled:
        _refuse(operand, [axis for axis, label in enumerate(labels) if label not in (*result, *harmless)])
    places = _united(
        Place(replace(rows, axis=order.index(labels[rows.axis])))
        for operand, labels in labelled
        for rows, _ in operand.rows.places
    )
    return (place for place in places if place.rows.axis < len(result))


def _contracted(call: PaddedCall) -> Iterator[Place]:
    *added, left, right = call.operands
    rows, columns = ["rows"] * (len(left.shape) > 1), ["columns"] * (len(right.shape) > 1)
    result = [*range(len(rows + columns) - len(call.shape), 0), *rows, *columns]
    labelled = [
        (left, [*range(2 - len(left.shape), 0), *rows, "inner"]),
        (right, [*range(2 - len(right.shape), 0), "inner", *columns]),
        *((each, result[-len(each.shape) :]) for each in added),
    ]
    return _multiplied(labelled, result)


def _einsum(call: PaddedCall) -> Iterator[Place]:
    inputs, arrow, result = call.arguments["equation"].value.replace(" ", "").partition("->")
    if not arrow or "." in inputs:
        raise Dependent(UNKNOWN)
    return _multiplied([*zip(call.operands, inputs.split(","), strict=True)], result)


def _attention(call: PaddedCall) -> Iterator[Place]:
    """A step of `query` attends to those of `key` that `attn_mask` shows, or to those that are not behind it."""
    query = call.operands[0]
    if call.arguments["dropout_p"]:
        raise Dependent("draws random numbers")
    mask = call.arguments["attn_mask"]
    fill = None if mask is None else _number_at(mask, -1)
    is_masked = fill is not None and (fill == 0 if mask.is_mask else fill <= LOW)
    is_causal = call.arguments["is_causal"] and any(rows.axis == len(call.shape) - 2 for rows, _ in query.rows.places)
    axes = (("query", "channel"), ("key", "channel"), ("key", "value"), ("query", "key"))
    labelled = [
        (each, [*range(2 - len(each.shape), 0), *names]) for each, names in zip(call.operands, axes, strict=False)
    ]
    result = [*range(2 - len(call.shape), 0), "query", "value"]
    return _summed(labelled, result, ["key"] * (is_masked or is_causal))


def _gathered(call: PaddedCall) -> Iterator[Place]:
    """Takes entries along `dim` by their numbers, which are those of steps that the call has."""
    if call.name != "gather":
        raise Dependent(UNKNOWN)
    table, index = call.operands
    dim = call.arguments["dim"] % len(table.shape)
    if any(rows.axis == dim and rows.before != 1 for rows, _ in table.rows.places):
        raise Dependent(UNKNOWN)
    kept = [place for place in table.rows.places if place.rows.axis != dim]
    return _united([*index.rows.places, *kept])


def _indexed(call: PaddedCall) -> Iterator[Place]:
    """Takes entries of `self` at the places that `indices` tell, one tensor or None per axis."""
    table, *indices = call.operands
    by_axis = {axis: index for axis, index in enumerate(call.arguments["indices"]) if index is not None}
    if any(index.is_mask for index in indices):
        raise Dependent(UNKNOWN)
    rest = [axis for axis in range(len(table.shape)) if axis not in by_axis]
    is_together = max(by_axis) - min(by_axis) == len(by_axis) - 1
    begin = min(by_axis) if is_together else 0
    rank = max(len(index.shape) for index in indices)
    found = [place for index in indices for place in _shifted(index, begin + rank - len(index.shape))]
    fills: dict[int, Number] = {}
    for rows, fill in table.rows.places:
        if rows.axis in rest:
            axis = rest.index(rows.axis)
            found.append(Place(replace(rows, axis=axis if axis < begin else axis + rank)))
            continue
        index = by_axis[rows.axis]
        steps = [r for r, _ in index.rows.places if r.numbered]
        if not steps or (rows.before, rows.after) != (1, 1):
            raise Dependent(f"takes steps of `self` by their numbers on axis {rows.axis}")
        axis = begin + rank - len(index.shape) + steps[0].axis
        fills[axis] = None if axis in fills else fill
    return (Place(rows, fills.get(rows.axis)) for rows, _ in _united(found))


_KEEPS_AXES = ("to", "_to_copy", "clone", "contiguous", "detach", "alias", "type_as")


def _moved(call: PaddedCall) -> Iterator[Place]:
    """Moves axes, or none."""
    operand = call.operands[0]
    order = [*range(len(operand.shape))]
    if call.name in ("transpose", "mT", "t") and len(order) > 1:
        one, other = call.arguments.get("dim0", -2), call.arguments.get("dim1", -1)
        order[one], order[other] = order[other], order[one]
    elif call.name == "permute":
        order = [axis % len(order) for axis in call.arguments["dims"]]
    elif call.name not in _KEEPS_AXES:
        raise Dependent(UNKNOWN)
    return (Place(replace(rows, axis=order.index(rows.axis)), fill) for rows, fill in operand.rows.places)


def _reshaped(call: PaddedCall) -> Iterator[Place]:
    operand = call.operands[0]
    for rows, fill in operand.rows.places:
        for axis in range(len(call.shape)):
            with contextlib.suppress(Dependent):
                yield Place(reshaped(rows, operand.shape, call.shape, axis, call.length), fill)


def _expanded(call: PaddedCall) -> Iterator[Place]:
    """Axes of size 1 get the length."""
    operand = call.operands[0]
    kept = {place.rows.axis: place for place in _shifted(operand, len(call.shape) - len(operand.shape))}
    new = {axis: Place(Rows(axis), operand.rows.value) for axis, size in enumerate(call.shape) if size == call.length}
    return iter((new | kept).values())


def _filled(call: PaddedCall) -> Iterator[Place]:
    return (Place(Rows(axis), throughout(call)) for axis, size in enumerate(call.shape) if size == call.length)


def _numbered(call: PaddedCall) -> Iterator[Place]:
    if call.arguments.get("start", 0) != 0 or call.arguments.get("step", 1) != 1:
        raise Dependent("counts steps otherwise than from 0 by 1")
    yield Place(Rows(0, numbered=True))


def _sliced(call: PaddedCall) -> Iterator[Place]:
    """Takes entries from the first on: each step, or as many of every call."""
    operand = call.operands[0]
    axis = call.arguments["dim"] % len(call.shape)
    if call.arguments["start"] not in (None, 0) or call.arguments["step"] != 1:
        _refuse(operand, [axis])
    places = {place.rows.axis: place for place in operand.rows.places}
    if axis not in places and call.shape[axis] == call.length:
        places[axis] = Place(Rows(axis))
    elif axis in places and call.shape[axis] % call.length:
        del places[axis]
    return iter(places.values())


def _recurrent(call: PaddedCall) -> Iterator[Place]:
    """Runs over the steps: none knows of those behind it."""
    first, *others = call.operands
    steps = 1 if call.arguments["batch_first"] else 0
    if len(first.shape) != 3 or call.arguments["bidirectional"] or call.arguments["train"]:
        raise Dependent(UNKNOWN)
    _refuse(first, {0, 1, 2} - {steps})
    for other in others:
        _refuse(other, range(len(other.shape)))
    return _united(first.rows.places) if call.shape[steps] == call.length else iter(())


RULES: dict[str, Callable[[PaddedCall], Iterable[Place]]] = {
    "aligned": _aligned,
    "certain": _aligned,
    "first": _first,
    "along": _along,
    "gathered": _gathered,
    "contracted": _contracted,
    "einsum": _einsum,
    "indexed": _indexed,
    "embedded": _embedded,
    "normalized": _first,
    "recurrent": _recurrent,
    "moved": _moved,
    "reshaped": _reshaped,
    "expanded": _expanded,
    "filled": _filled,
    "numbered": _numbered,
    "sliced": _sliced,
}
"""A rule per kind of operators."""

RULES_BY_NAME = {"scaled_dot_product_attention": _attention, "tril": _triangle, "triu": _triangle}
"""Rules of operators whose kind tells less."""
