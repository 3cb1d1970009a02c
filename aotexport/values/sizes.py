"""Encode sympy expressions of the shape environment as size expressions of the format."""

from __future__ import annotations

import math
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.values.sizes import MAX_EXPONENT

_BY_CLASS: dict[str, str] = {
    "Add": "add",
    "Mul": "mul",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "ToFloat": "float",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "TruncToInt": "trunc",
    "FloorToInt": "floor",
    "floor": "floor",
    "CeilToInt": "ceil",
    "RoundToInt": "round",
    "Max": "max",
    "Min": "min",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "Where": "where",
    "CeilDiv": "ceildiv",
}
_SWAPPED = {"GreaterThan": "le", "StrictGreaterThan": "lt"}


class _Unsupported(Exception):
    pass


def encode_size(value: Any, *, or_none: bool = False) -> Any:
    """Return the record of an integer or symbolic integer.

    Args:
        value: int, SymInt or SymBool.
        or_none: return None instead of refusing an expression that the format cannot express (data-dependent ones).

    Raises:
        ExportFailed: such an expression, unless `or_none`.
    """
    if isinstance(value, int):
        return int(value)
    expression = value.node.expr if isinstance(value, torch.SymInt | torch.SymBool) else value
    try:
        return encode_expression(expression)
    except _Unsupported as error:
        if or_none:
            return None
        raise ExportFailed(f"the size `{expression}` cannot be expressed: {error}") from None


def encode_expression(expression: Any) -> Any:
    """Return the record of a sympy expression over integer symbols: a size, or a float within one."""
    import sympy  # Most that encode sizes have integers alone, and its import takes a sixth of torch's.

    if isinstance(expression, int | sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float) and math.isfinite(expression):
        return float(expression)
    if isinstance(expression, sympy.Symbol):
        return expression.name
    if expression in (sympy.true, sympy.false):
        return int(bool(expression))
    name = type(expression).__name__
    args: Any = expression.args
    if name in _SWAPPED:
        return SizeExpression(op=_SWAPPED[name], args=tuple(encode_expression(arg) for arg in reversed(args)))  # type: ignore[arg-type]
    if name == "Abs":
        operand = encode_expression(args[0])
        return SizeExpression(op="max", args=(operand, SizeExpression(op="mul", args=(-1, operand))))
    if name == "FloatPow":
        return SizeExpression(op="pow", args=(encode_expression(args[0]), encode_expression(args[1])))
    if isinstance(expression, sympy.Pow) or name == "PowByNatural":
        if not (args[1].is_Integer and 0 <= args[1] <= MAX_EXPONENT):
            raise _Unsupported(f"an exponent that is no integer from 0 to {MAX_EXPONENT}")
        return SizeExpression(op="pow", args=(encode_expression(args[0]), int(args[1])))
    if name in _BY_CLASS:
        commutes = name in ("Add", "Mul") or len(args) > 2
        ordered = sorted(args, key=sympy.default_sort_key) if commutes and name != "Where" else args
        return SizeExpression(op=_BY_CLASS[name], args=tuple(encode_expression(arg) for arg in ordered))  # type: ignore[arg-type]
    raise _Unsupported(f"no record for `{name}`")
