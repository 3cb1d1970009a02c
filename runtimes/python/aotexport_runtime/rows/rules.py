"""What kinds of operators do with rows of their operands; `operators.txt` says which are of which kind.

A rule raises `Dependent` unless each row of the result comes from the same row of operands; shapes say where it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from aotexport_runtime.allowed.operators import kinds_in
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.values.sizes import symbols_of


@dataclass(frozen=True)
class Rows:
    """Where a value has the rows of the batch: row `b` is at `(o * rows + b) * after + i` of an axis.

    Attributes:
        axis: the one axis whose size depends on the number of rows.
        before: how many `o` there are; not 1 where the axis was merged with one before it.
        after: how many `i` there are.
        numbered: whether the value is the number of each row: 0, 1 and so on, which other calls of a batch change.
    """

    axis: int
    before: int = 1
    after: int = 1
    numbered: bool = False


class Dependent(Exception):
    """Rows may know of each other; the message goes on behind the operator's name."""


def number_of(size: Size | float, symbol: str) -> int:
    """Return the value of a size where each symbol, and what is no polynomial, is a large number of its own.

    Two sizes of one value are then equal as polynomials, and one that a symbol's number divides has it as a factor:
    numbers of 128 bits agree by chance in no graph. No polynomial in `symbol`, the number of rows: `Dependent`.
    """
    if isinstance(size, int):
        return size
    if not isinstance(size, str | float) and size.op in ("add", "mul"):
        values = [number_of(each, symbol) for each in size.args]
        return sum(values) if size.op == "add" else math.prod(values)
    if not isinstance(size, str | float) and size.op == "pow" and isinstance(size.args[1], int):
        return number_of(size.args[0], symbol) ** size.args[1]
    if size != symbol and symbol in symbols_of(size):
        raise Dependent("has a size that is no multiple of the number of rows")
    return int.from_bytes(hashlib.sha256(repr(size).encode()).digest()[:16])


def reshaped(rows: Rows, source: tuple[int, ...], result: tuple[int, ...], axis: int, count: int) -> Rows:
    """Return where elements of shape `source`, in their order, have `rows` in the shape `result`; none: `Dependent`.

    Shapes and `count`, the number of rows, are as by `number_of`; `axis` of the result has rows.
    """
    if math.prod(source) != math.prod(result) or 0 in source:
        raise Dependent("changes how many elements there are")
    after, rest = divmod(rows.after * math.prod(source[rows.axis + 1 :]), math.prod(result[axis + 1 :]))
    before, left = (0, 1) if rest else divmod(result[axis], count * after)
    if left:
        raise Dependent("spreads rows over several axes")
    return Rows(axis, before, after, rows.numbered)


S = TypeVar("S")


class Operand(NamedTuple, Generic[S]):
    """A tensor among the arguments, or among the items of one.

    Attributes:
        shape: its sizes, by `number_of`.
        rows: what is known of it, such as where it has rows.
        is_mask: whether it has truth values.
    """

    parameter: str
    shape: tuple[int, ...]
    rows: S
    is_mask: bool


class Call(NamedTuple, Generic[S]):
    """A call of an operator.

    Attributes:
        arguments: all arguments by their parameters' names, tensors as `Operand`.
        operands: all tensors, in order.
        counts: whether an argument depends on the number of rows.
    """

    arguments: Mapping[str, Any]
    operands: Sequence[Operand[S]]
    counts: bool = False


def _apart(operand: Operand, axes: Sequence[int]) -> None:
    """Refuse a call that computes along `axes` of an operand where they have its rows."""
    if operand.rows is not None and operand.rows.axis in axes:
        raise Dependent(f"computes along axis {operand.rows.axis} of `{operand.parameter}`, which has the rows")


def _aligned(call: Call, trailing: int = 0) -> None:
    """Operands are broadcast to one another; each row is computed along the last `trailing` axes."""
    for operand in call.operands:
        _apart(operand, range(len(operand.shape) - trailing, len(operand.shape)))
    _alike(call)
    if len({len(shape) - rows.axis for _, shape, rows, _ in call.operands if rows is not None}) > 1:
        raise Dependent("has the rows of its operands on different axes")


def _alike(call: Call) -> None:
    if len({(each.rows.before, each.rows.after) for each in call.operands if each.rows is not None}) > 1:
        raise Dependent("has the rows of its operands in different orders")


def _only(call: Call, *parameters: str) -> None:
    other = next((each.parameter for each in call.operands if each.rows and each.parameter not in parameters), None)
    if other is not None:
        raise Dependent(f"takes rows as `{other}`")


def _first(call: Call, trailing: int) -> None:
    """Only the first operand may have rows."""
    _only(call, call.operands[0].parameter)
    _aligned(call, trailing)


def _leading(call: Call, _: int) -> None:
    """Rows are those of the first axis; each is computed along all others."""
    _alike(call)
    for operand in call.operands:
        _apart(operand, range(1, len(operand.shape)))


def _along(call: Call, _: int) -> None:
    """Computes along axes that it names; of all, where it names none."""
    _aligned(call)
    for operand in call.operands:
        _apart(operand, named_axes(call.arguments, len(operand.shape)))


def named_axes(arguments: Mapping[str, Any], rank: int) -> list[int]:
    """Return the axes of a tensor that a call computes along."""
    named = [arguments[name] for name in DIMENSIONS if name in arguments]
    axes = [axis for each in named for axis in (each if isinstance(each, list) else [each])]
    return [axis % rank for axis in axes if rank] if axes and None not in axes else [*range(rank)]


DIMENSIONS = ("dim", "dims", "dimension", "dim1", "dim2")


def _gathered(call: Call, _: int) -> None:
    """Takes or writes elements along `dim`, at places that a tensor tells, without broadcasting."""
    table, index = call.operands[:2]
    is_vector = len(index.shape) == 1
    own = is_vector or (index.rows is not None and index.rows.axis == call.arguments["dim"] % len(table.shape))
    if table.rows is None and own and len(call.operands) == 2:
        return
    if not is_vector and any(operand.rows is None for operand in call.operands):
        raise Dependent("takes elements by the number of the row")
    _along(call, 0)


def _contracted(call: Call, _: int) -> None:
    """Multiplies the matrices or vectors that are its last two operands."""
    left, right = call.operands[-2:]
    _apart(left, [len(left.shape) - 1])
    _apart(right, [max(len(right.shape) - 2, 0)])
    if sum(operand.rows is not None for operand in call.operands) > 1:
        _aligned(call)


def _einsum(call: Call, _: int) -> None:
    inputs, arrow, result = call.arguments["equation"].value.replace(" ", "").partition("->")
    names = {
        letters[operand.rows.axis]
        for letters, operand in zip(inputs.split(","), call.operands, strict=True)
        if operand.rows is not None and "." not in letters
    }
    if not arrow or "." in inputs or len(names) != 1 or not names <= set(result):
        raise Dependent("has rows under no one letter of its result")
    _alike(call)


def _indexed(call: Call, _: int) -> None:
    """Takes elements of `self` at the places that `indices` tell, one tensor or None per axis."""
    table, indices = call.operands[0], [each for each in call.operands[1:] if each.parameter == "indices"]
    by_axis: dict[int, Operand | None] = {}
    axis = 0
    for index in call.arguments["indices"]:
        width = len(index.shape) if index is not None and index.is_mask else 1
        by_axis |= dict.fromkeys(range(axis, axis + width), index)
        axis += width
    _aligned(Call(call.arguments, indices))
    own = None if table.rows is None else by_axis.get(table.rows.axis)
    numbered = [index for index in indices if index.rows is not None and index.rows.numbered]
    if numbered and (own not in numbered or table.rows is None or (table.rows.before, table.rows.after) != (1, 1)):
        raise Dependent("takes elements by the number of the row")
    if table.rows is not None and not numbered and (own is not None or any(index.rows for index in indices)):
        raise Dependent(f"takes elements along axis {table.rows.axis} of `self`, which has the rows")


def _written(call: Call, _: int) -> None:
    """Writes a number where a mask tells."""
    _only(call, "self", "indices")
    table, *masks, values = call.operands
    if len(masks) != 1 or not masks[0].is_mask or call.arguments["indices"][0] is None or values.shape:
        raise Dependent("writes by other indices than one mask, or more than one number")
    if table.rows != masks[0].rows:
        raise Dependent("has the rows of its operands on different axes")


def _padded(call: Call, _: int) -> None:
    _first(call, 0)
    rank = len(call.operands[0].shape)
    _apart(call.operands[0], [rank - 1 - index // 2 for index, size in enumerate(call.arguments["pad"]) if size != 0])


def _batch_norm(call: Call, _: int) -> None:
    if call.arguments.get("training"):
        raise Dependent("computes the statistics of the batch")
    _first(call, 0)


def _certain(call: Call, trailing: int) -> None:
    """Drops elements by chance in training."""
    if call.arguments.get("train", True) and call.arguments.get("p", call.arguments.get("dropout_p")):
        raise Dependent("draws random numbers")
    _aligned(call, trailing)


def _recurrent(call: Call, _: int) -> None:
    """Runs over steps; a batch is the second axis, or the first axis of the input."""
    _only(call, "input", "hx")
    _alike(call)
    if call.arguments.get("train") and call.arguments["dropout"]:
        raise Dependent("draws random numbers")
    for operand in call.operands:
        is_first = operand.parameter == "input" and call.arguments["batch_first"]
        _apart(operand, [axis for axis in range(len(operand.shape)) if axis != (0 if is_first else 1)])


def _sliced(call: Call, _: int) -> None:
    """Keeps every row, as the size of the result tells, if it begins at the first."""
    if call.arguments["start"] not in (None, 0) or call.arguments["step"] != 1:
        _along(call, 0)


def _numbered(call: Call, _: int) -> None:
    if call.arguments.get("start", 0) != 0 or call.arguments.get("step", 1) != 1:
        raise Dependent("counts rows otherwise than from 0 by 1")


def _one_hot(call: Call, _: int) -> None:
    if call.arguments["num_classes"] == -1:
        raise Dependent("has as many classes as the greatest number of the batch tells")


RULES: dict[str, Callable[[Call, int], None]] = {
    "aligned": _aligned,
    "first": _first,
    "leading": _leading,
    "along": _along,
    "gathered": _gathered,
    "contracted": _contracted,
    "einsum": _einsum,
    "indexed": _indexed,
    "written": _written,
    "embedded": lambda call, _: _only(call, "indices"),
    "normalized": lambda call, _: _first(call, len(call.arguments["normalized_shape"])),
    "padded": _padded,
    "batch_norm": _batch_norm,
    "certain": _certain,
    "recurrent": _recurrent,
    "one_hot": _one_hot,
    "moved": lambda call, _: None,
    "reshaped": lambda call, _: None,
    "expanded": _aligned,
    "filled": lambda call, _: None,
    "numbered": _numbered,
    "sliced": _sliced,
}
"""A rule per kind; the second argument is the number behind the kind in `operators.txt`."""


@cache
def kinds() -> dict[str, tuple[str, int]]:
    """Return the kinds of operators, each with its number, by base name, or by `base.overload` where others differ."""
    parts = {name: kind.partition(" ") for name, kind in kinds_in("rows/operators.txt").items()}
    return {name: (kind, int(trailing or 0)) for name, (kind, _, trailing) in parts.items()}
