"""Evaluation of size expressions, and their Python source for generated code. No torch, no sympy."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.sizes import Size, SizeExpression

MAX_TERMS = 500
MAX_EXPONENT = 64
MAX_NBITS = 1024
"""Most bits that the value of an expression may have, whatever its symbols are."""

SYMBOL_NBITS = 63
INT64_MAX = (1 << 63) - 1

OPERATORS: dict[str, Callable[..., int]] = {
    "add": lambda *values: sum(values),
    "mul": lambda *values: math.prod(values),
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "min": min,
    "max": max,
    "ceildiv": lambda a, b: -(-a // b),
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "not": lambda value: int(not value),
}
"""Operators that need all of their operands; `and`, `or` and `where` stop early, as in Python."""

_ARITY = {"floordiv": 2, "mod": 2, "pow": 2, "ceildiv": 2, "eq": 2, "ne": 2, "lt": 2, "le": 2, "not": 1, "where": 3}
_DIVISIONS = ("floordiv", "mod", "ceildiv")


def evaluate(size: Size, symbols: Mapping[str, int]) -> int:
    """Return the value of `size`.

    Args:
        size: an integer, a symbol, or an expression that `check_size` accepted.
        symbols: value per symbol.

    Raises:
        KeyError: a symbol has no value.
        ZeroDivisionError: a divisor is 0 for these values.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return symbols[size]
    if size.op == "where":
        return evaluate(size.args[1 if evaluate(size.args[0], symbols) else 2], symbols)
    values = (evaluate(arg, symbols) for arg in size.args)
    if size.op == "and":
        return int(all(values))
    if size.op == "or":
        return int(any(values))
    return OPERATORS[size.op](*values)


def check_size(size: Size, known: frozenset[str] | set[str], *, where: str) -> None:
    """Refuse an expression with unknown symbols, wrong operands, absurd length, or unbounded values.

    How deep it is nested is bounded by the JSON that it stands in (`codec.MAX_DEPTH`).

    Raises:
        BundleInvalid: names the fault.
    """
    terms = _check(size, known, where)[1]
    if terms > MAX_TERMS:
        raise BundleInvalid(f"a size expression has {terms} terms; at most {MAX_TERMS} are read", where=where)


def _check(size: Size, known: frozenset[str] | set[str], where: str) -> tuple[int, int]:
    """Return how many bits the value of `size` has at most, and how many terms `size` has."""
    if isinstance(size, int):
        if abs(size) > INT64_MAX:
            raise BundleInvalid("an integer of a size has more than 64 bits", where=where)
        return size.bit_length(), 1
    if isinstance(size, str):
        if size not in known:
            raise BundleInvalid(f"unknown symbol {size[:40]!r} in a size", where=where)
        return SYMBOL_NBITS, 1
    _check_operands(size, where)
    checked = [_check(arg, known, where) for arg in size.args]
    nbits = _nbits(size, [nbits for nbits, _ in checked])
    if nbits > MAX_NBITS:
        raise BundleInvalid(f"a size expression may have values of more than {MAX_NBITS} bits", where=where)
    return nbits, 1 + sum(terms for _, terms in checked)


def _check_operands(size: SizeExpression, where: str) -> None:
    count, expected = len(size.args), _ARITY.get(size.op)
    if count < 2 if expected is None else count != expected:
        wanted = "two or more" if expected is None else expected
        raise BundleInvalid(f"size operator `{size.op}` takes {wanted} operands, got {count}", where=where)
    if size.op in _DIVISIONS and size.args[1] == 0:
        raise BundleInvalid(f"size operator `{size.op}` divides by zero", where=where)
    if size.op == "pow" and not (isinstance(size.args[1], int) and 0 <= size.args[1] <= MAX_EXPONENT):
        raise BundleInvalid(f"the exponent of a size is no integer from 0 to {MAX_EXPONENT}", where=where)


def _nbits(size: SizeExpression, operands: list[int]) -> int:
    if size.op == "mul":
        return sum(operands)
    if size.op == "pow":
        exponent = size.args[1]
        assert isinstance(exponent, int)
        return max(operands[0] * exponent, 1)
    return max(operands) + len(operands).bit_length()


_SIGNS = {"add": "+", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**"}
_RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "and": "and", "or": "or"}
_INFIX = {op: f" {sign} " for op, sign in (_SIGNS | _RELATIONS).items()}


def describe(size: Size, names: Mapping[str, str] = {}) -> str:
    """Return `size` for a person to read, symbols by their user's names."""
    if isinstance(size, int):
        return str(size)
    if isinstance(size, str):
        return names.get(size, size)
    operands = [describe(arg, names) for arg in size.args]
    if size.op in _INFIX:
        return "(" + _INFIX[size.op].join(operands) + ")"
    return f"{size.op}({', '.join(operands)})"


def symbols_of(size: Size) -> set[str]:
    """Return the symbols that occur in `size`."""
    if isinstance(size, SizeExpression):
        return set().union(*map(symbols_of, size.args))
    return {size} if isinstance(size, str) else set()


def source(size: Size, symbol_source: Callable[[str], str]) -> str:
    """Return Python source that computes what `evaluate` returns, for generated code.

    Args:
        size: an expression that `check_size` accepted.
        symbol_source: source of a symbol's value; never text of the bundle.
    """
    if isinstance(size, int):
        # Parentheses, because a sign binds weaker than a power.
        return repr(int(size)) if size >= 0 else f"({int(size)!r})"
    if isinstance(size, str):
        return symbol_source(size)
    operands = [source(arg, symbol_source) for arg in size.args]
    if size.op in ("and", "or"):
        return f"int(bool({_INFIX[size.op].join(operands)}))"
    if size.op in _COMPARISONS:
        return f"int({_INFIX[size.op].join(operands)})"
    if size.op in _INFIX:
        return "(" + _INFIX[size.op].join(operands) + ")"
    if size.op == "ceildiv":
        return f"(-(-{operands[0]} // {operands[1]}))"
    if size.op == "not":
        return f"int(not {operands[0]})"
    if size.op == "where":
        return f"({operands[1]} if {operands[0]} else {operands[2]})"
    return f"{size.op}({', '.join(operands)})"


_COMPARISONS = ("eq", "ne", "lt", "le")
