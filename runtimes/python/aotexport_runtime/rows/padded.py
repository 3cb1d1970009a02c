"""What is known of the values of a call that is padded, and what operators make of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aotexport_runtime.rows.rules import Operand, Rows
from aotexport_runtime.schema.values import FloatArgument

Number = float | None
"""What all of some entries are, truth values as 0 and 1; None: not known."""

LOW = -1e4
"""Scores of attention are masked by this at most; -inf stands for any number plus such a one."""


class Place(NamedTuple):
    """An axis of a value that has the length.

    Attributes:
        rows: where the steps are.
        fill: what padded steps are, at steps of the call along other axes.
    """

    rows: Rows
    fill: Number = None


@dataclass(frozen=True)
class Padded:
    """What is known of a value: the axes that have the length, in order; the number that it is throughout."""

    places: tuple[Place, ...] = ()
    value: Number = None


class PaddedCall(NamedTuple):
    """A call of an operator.

    Attributes:
        name: of the operator, without overload.
        kind: as in `operators.txt`.
        trailing: the number behind the kind.
        arguments: by their parameters' names, tensors as `Operand`.
        operands: all tensors, in order.
        shape: that of a result, by `number_of`.
        length: by `number_of`.
    """

    name: str
    kind: str
    trailing: int
    arguments: Mapping[str, Any]
    operands: Sequence[Operand[Padded]]
    shape: tuple[int, ...]
    length: int


def _sum(a: Number, b: Number) -> Number:
    if any(each is not None and each <= LOW for each in (a, b)):
        return -math.inf
    return None if a is None or b is None else a + b


def _difference(a: Number, b: Number) -> Number:
    return _sum(a, None if b is None else -b)


def _product(a: Number, b: Number) -> Number:
    return 0.0 if 0 in (a, b) else None if a is None or b is None else a * b


def _and(a: Number, b: Number) -> Number:
    return 0.0 if 0 in (a, b) else None if a is None or b is None else 1.0


def _or(a: Number, b: Number) -> Number:
    return 0.0 if (a, b) == (0, 0) else 1.0 if a or b else None


def _not(a: Number) -> Number:
    return None if a is None else float(a == 0)


def _where(condition: Number, a: Number, b: Number) -> Number:
    return (a if a == b else None) if condition is None else a if condition else b


def _compared(holds: Callable[[float, float], bool]) -> Callable[[Number, Number], Number]:
    return lambda a, b: None if a is None or b is None or math.inf in (abs(a), abs(b)) else float(holds(a, b))


_FOLDS: dict[tuple[str, ...], dict[str, Callable[..., Number]]] = {
    ("self", "other"): {
        "add": _sum,
        "sub": _difference,
        "rsub": lambda a, b: _difference(b, a),
        "mul": _product,
        "eq": _compared(lambda a, b: a == b),
        "ne": _compared(lambda a, b: a != b),
        "lt": _compared(lambda a, b: a < b),
        "le": _compared(lambda a, b: a <= b),
        "gt": _compared(lambda a, b: a > b),
        "ge": _compared(lambda a, b: a >= b),
        **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), _and),
        **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), _or),
    },
    ("self",): {
        **dict.fromkeys(("bitwise_not", "logical_not"), _not),
        "zeros_like": lambda a: 0.0,
        "ones_like": lambda a: 1.0,
    },
    ("condition", "self", "other"): {"where": _where},
    ("self", "mask", "value"): {"masked_fill": lambda a, mask, b: _where(mask, b, a)},
    ("input",): {"dropout": lambda a: a},
}
"""By the parameters whose numbers an operator computes with."""

_BITWISE = ("__and__", "bitwise_and", "__or__", "bitwise_or", "bitwise_not")


def folded(call: PaddedCall, number: Callable[[Operand[Padded]], Number]) -> Number:
    """Return what a pointwise operator makes of the `number` of each operand."""
    if call.arguments.get("alpha", 1) != 1 or (call.name in _BITWISE and not all(op.is_mask for op in call.operands)):
        return None
    for parameters, folds in _FOLDS.items():
        if call.name in folds:
            given = [call.arguments[each] for each in parameters]
            return folds[call.name](*(number(each) if isinstance(each, Operand) else _literal(each) for each in given))
    return None


def _literal(argument: Any) -> Number:
    if isinstance(argument, FloatArgument):
        return None if argument.value == "nan" else float(argument.value)
    return float(argument) if isinstance(argument, int | float) else None


def throughout(call: PaddedCall) -> Number:
    """Return the number that a result is throughout."""
    if call.kind == "filled":
        is_ones, is_zeros = call.name.endswith("ones"), call.name.endswith("zeros")
        return 1.0 if is_ones else 0.0 if is_zeros else _literal(call.arguments.get("fill_value"))
    if call.kind in ("moved", "reshaped", "expanded", "sliced"):
        return call.operands[0].rows.value
    return folded(call, lambda each: each.rows.value)
