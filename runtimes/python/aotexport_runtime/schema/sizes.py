"""Symbolic integers: sizes, strides and offsets as small expression trees over named symbols."""

from __future__ import annotations

from typing import Annotated, Literal

from aotexport_runtime.schema.bounded import MAX_TERMS, Bounds, Count, IndexOf, Line, Over, Record, Whole

_Integral = Literal["add", "mul", "floordiv", "mod", "pow", "min", "max", "ceildiv"]
_Truth = Literal["eq", "ne", "lt", "le", "and", "or", "not"]
_Real = Literal["float", "truediv", "sqrt", "trunc", "floor", "ceil", "round"]
SizeOperator = Literal[_Integral, _Truth, "where", _Real]


class SizeExpression(Record, kw_only=True):
    """An operator (5.1) applied to sizes, in order."""

    op: SizeOperator
    args: Annotated[tuple[Size | float, ...], Bounds(minItems=1, maxItems=MAX_TERMS, code="size-malformed", apart=True)]


Size = int | str | SizeExpression
"""An integer, the name of a symbol, or an expression."""

Condition = Annotated[SizeExpression, Over("Program.dimensions.symbol")]
"""A truth over the symbols of a program."""


class Dimension(Record, kw_only=True):
    """A symbol: a dynamic size of the program's inputs, or a dynamic integer among them.

    Attributes:
        name: the user's name for it (`batch`), shown in errors.
        min: least value allowed, inclusive, as `max` is the greatest; None: unbounded.
        input_index: index in `Program.inputs` of the tensor (or `SizeInput`) that the value is read from.
        axis: axis of that tensor whose size is read; 0 for a `SizeInput`, whose value is read.
        factor: the size read equals `factor * symbol + offset`; not 0.
    """

    symbol: str
    name: Line
    min: Whole | None
    max: Whole | None = None
    input_index: Annotated[Count, IndexOf("Program.inputs")]
    axis: Count
    factor: Whole = 1
    offset: Whole = 0
