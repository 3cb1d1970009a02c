"""Where values have the rows of a batch, and sizes as numbers that tell polynomials apart."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

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
    """Return the value of `size` where each symbol, and what is no polynomial, is a large number of its own.

    Two sizes of one value are then equal as polynomials, and one that a symbol's number divides has it as a factor:
    numbers of 128 bits agree by chance in no graph.

    Args:
        size: of an axis.
        symbol: the number of rows.

    Raises:
        Dependent: it is no polynomial in `symbol`.
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
    """Return where the elements of `source`, in their order, have their rows in another shape.

    Args:
        rows: of `source`.
        source: shape, as by `number_of`.
        result: shape.
        axis: the axis of `result` that has rows.
        count: the number of rows, as by `number_of`.

    Raises:
        Dependent: they are no part of one axis.
    """
    if math.prod(source) != math.prod(result) or 0 in source:
        raise Dependent("changes how many elements there are")
    after, rest = divmod(rows.after * math.prod(source[rows.axis + 1 :]), math.prod(result[axis + 1 :]))
    before, left = (0, 1) if rest else divmod(result[axis], count * after)
    if left:
        raise Dependent("spreads rows over several axes")
    return Rows(axis, before, after, rows.numbered)
