"""Evaluation of size expressions by Python source, also of generated code: exact integers, 64-bit floats. No torch."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from aotexport_runtime.allowed.operators import sym_max, sym_min, whole
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import INT64_MAX, MAX_TERMS
from aotexport_runtime.schema.sizes import Size, SizeExpression

MAX_EXPONENT = 64
MAX_NBITS = 1024
"""Most bits that the value of an expression may have, whatever its symbols are."""

SYMBOL_NBITS = 63

UNDEFINED = (ArithmeticError, ValueError, TypeError)
"""Errors of an expression without a value: a division by zero, the root of a negative number."""


_COMPARISONS = ("eq", "ne", "lt", "le")
_ARITY = {
    **dict.fromkeys(("floordiv", "mod", "pow", "ceildiv", "truediv", *_COMPARISONS), 2),
    **dict.fromkeys(("not", "float", "sqrt", "trunc", "floor", "ceil", "round"), 1),
    "where": 3,
}
_DIVISIONS = ("floordiv", "mod", "ceildiv", "truediv")
_TRUTHS = (*_COMPARISONS, "and", "or", "not")
_TO_FLOAT = ("float", "truediv", "sqrt")
_TO_INTEGER = ("trunc", "floor", "ceil", "round")
_INTEGERS_ONLY = ("floordiv", "mod", "ceildiv")


def type_of(size: Size | float | None) -> Literal["int", "float", "bool"]:
    """Return the Python type of the value of `size`; None stands for an integer that depends on data."""
    if isinstance(size, float):
        return "float"
    if not isinstance(size, SizeExpression) or size.op in _TO_INTEGER:
        return "int"
    if size.op in _TRUTHS:
        return "bool"
    operands = size.args[1:] if size.op == "where" else size.args
    return "float" if size.op in _TO_FLOAT or "float" in map(type_of, operands) else "int"


def evaluate(size: Size, symbols: Mapping[str, int]) -> int:
    """Return the value of a checked size for values of all its symbols, or raise one of `UNDEFINED`: it has none."""
    if isinstance(size, int):
        return size
    return symbols[size] if isinstance(size, str) else _function(msgspec.json.encode(size))(symbols)


@functools.lru_cache(maxsize=4096)
def _function(size: bytes) -> Callable[[Mapping[str, int]], int]:
    """Return a function of `symbols` with the value of an expression, by its JSON, which tells 1 and 1.0 apart."""
    expression = source(msgspec.json.decode(size, type=SizeExpression), "symbols[{!r}]".format)
    return eval(f"lambda symbols: {expression}", {**SCOPE})


def check_size(size: Size, known: frozenset[str] | set[str], *, where: Place) -> None:
    """Refuse an expression with unknown symbols, wrong operands, absurd length, or values unbounded or not whole."""
    nbits, terms = _check(size, known, where)
    where.require(nbits is not None, "a size expression is a float, and a size an integer", "size-malformed/float")
    message = f"a size expression has {terms} terms; at most {MAX_TERMS} are read"
    where.require(terms <= MAX_TERMS, message, "size-malformed/terms")


def _check(size: Size | float, known: frozenset[str] | set[str], where: Place) -> tuple[int | None, int]:
    """Return how many bits the value of `size` has at most (None: it is a float), and how many terms `size` has."""
    if isinstance(size, float):
        return None, 1
    if isinstance(size, int):
        where.require(abs(size) <= INT64_MAX, "an integer of a size has more than 64 bits", "number-limit/size")
        return size.bit_length(), 1
    if isinstance(size, str):
        where.require(size in known, f"unknown symbol {size[:40]!r} in a size", "symbol-undefined/size")
        return SYMBOL_NBITS, 1
    count, expected = len(size.args), _ARITY.get(size.op)
    message = f"size operator `{size.op}` takes {expected or 'two or more'} operands, got {count}"
    where.require(count >= 2 if expected is None else count == expected, message, "size-malformed/operands")
    if size.op in _DIVISIONS and size.args[1] == 0:
        raise where.invalid(f"size operator `{size.op}` divides by zero", "size-malformed/zero")
    checked = [_check(arg, known, where) for arg in size.args]
    nbits = _nbits(size, [nbits for nbits, _ in checked], where)
    if nbits is not None and nbits > MAX_NBITS:
        raise where.invalid(f"a size expression may have values of more than {MAX_NBITS} bits", "size-malformed/bits")
    return nbits, 1 + sum(terms for _, terms in checked)


def _nbits(size: SizeExpression, operands: list[int | None], where: Place) -> int | None:
    if size.op in _TRUTHS:
        return 1
    if size.op in _TO_INTEGER:
        return INT64_MAX.bit_length() if operands[0] is None else operands[0]
    values = operands[1:] if size.op == "where" else operands
    whole = [nbits for nbits in values if nbits is not None]
    is_float = size.op in _TO_FLOAT or None in values
    if is_float and size.op in _INTEGERS_ONLY:
        raise where.invalid(f"size operator `{size.op}` takes integers", "size-malformed/integers")
    if is_float:
        return None
    if size.op == "mul":
        return sum(whole)
    if size.op == "pow":
        exponent = size.args[1]
        if not (isinstance(exponent, int) and 0 <= exponent <= MAX_EXPONENT):
            message = f"the exponent of a size is no integer from 0 to {MAX_EXPONENT}"
            raise where.invalid(message, "size-malformed/exponent")
        return max(whole[0] * exponent, 1)
    return max(whole) + len(operands).bit_length()


_SIGNS = {"add": "+", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**", "truediv": "/"}
_RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "and": "and", "or": "or"}
_TRUTH_FORMS = {
    **dict.fromkeys(_COMPARISONS, "int({})"),
    **dict.fromkeys(("and", "or"), "int(bool({}))"),
    "not": "int(not {})",
}
_INFIX = {op: f" {sign} " for op, sign in (_SIGNS | _RELATIONS).items()}


def describe(size: Size | float, names: Mapping[str, str] = {}) -> str:
    """Return `size` for a person to read, symbols by their user's names."""
    if isinstance(size, int | float):
        return str(size)
    if isinstance(size, str):
        return names.get(size, size)
    operands = _INFIX.get(size.op, ", ").join(describe(arg, names) for arg in size.args)
    return f"({operands})" if size.op in _INFIX else f"{size.op}({operands})"


def describe_range(low: int | None, high: int | None) -> str:
    """Return an inclusive range for a person to read; an unbounded side is empty."""
    return f"[{'' if low is None else low}:{'' if high is None else high}]"


def symbols_of(size: Size | float) -> set[str]:
    """Return the symbols that occur in `size`."""
    if isinstance(size, SizeExpression):
        return set().union(*map(symbols_of, size.args))
    return {size} if isinstance(size, str) else set()


def source(size: Size | float, symbol_source: Callable[[str], str]) -> str:
    """Return Python source of the value of a checked size; its names are builtins and those of `SCOPE`.

    `symbol_source`: source of a symbol's value; never text of the bundle.
    """
    if isinstance(size, int | float):
        # Parentheses, because a sign binds weaker than a power.
        value = float(size) if isinstance(size, float) else int(size)
        return repr(value) if math.copysign(1, value) > 0 else f"({value!r})"
    if isinstance(size, str):
        return symbol_source(size)
    operands = [source(arg, symbol_source) for arg in size.args]
    joined = _INFIX.get(size.op, ", ").join(operands)
    if size.op == "where":
        chosen = f"({operands[1]} if {operands[0]} else {operands[2]})"
        return f"float{chosen}" if type_of(size) == "float" else chosen
    if size.op == "ceildiv":
        return f"(-(-{operands[0]} // {operands[1]}))"
    form = _TRUTH_FORMS.get(size.op) or ("({})" if size.op in _INFIX else f"{size.op}({{}})")
    return form.format(joined)


def condition_source(size: Size | float, symbol_source: Callable[[str], str]) -> str:
    """Return Python source of a condition that stays whole where symbols are symbolic: in an export of a loaded module.

    Python's `and` and `or` would ask there which operands hold, and the export would hold for those alone.
    """
    if isinstance(size, SizeExpression) and size.op in ("and", "or"):
        operands = ", ".join(f"lambda: {condition_source(arg, symbol_source)}" for arg in size.args)
        return f"{size.op}_({operands})"
    if isinstance(size, SizeExpression) and size.op in _COMPARISONS:
        return f"({_INFIX[size.op].join(source(arg, symbol_source) for arg in size.args)})"
    return source(size, symbol_source)


def _connective(combine: Callable[[Any, Any], Any], *, stop: bool) -> Callable[..., Any]:
    """Return `and` or `or` of functions to conditions; symbolic conditions stay open."""

    def connected(*conditions: Callable[[], Any]) -> Any:
        result: Any = not stop
        for condition in conditions:
            value = condition()
            if isinstance(value, int) and bool(value) is stop:
                return stop
            result = result if isinstance(value, int) else combine(value, result)
        return result

    return connected


SCOPE: dict[str, Any] = {
    **{each.__name__: whole(each, OverflowError) for each in (math.trunc, math.floor, math.ceil, round)},
    "sqrt": math.sqrt,
    "max": sym_max,
    "min": sym_min,
    "and_": _connective(operator.and_, stop=False),
    "or_": _connective(operator.or_, stop=True),
}
"""Functions that generated source calls beside Python's builtins."""
