"""Arithmetic of sizes that takes every division and minimum within them as an unknown integer of its own.

Sympy's own rules look into every subterm, and sizes of detection models nest hundreds of them.
"""

from __future__ import annotations

from typing import Any

import sympy

from aotexport.process.patches import Patch

Unknowns = dict[sympy.Basic, sympy.Symbol]
"""What each term stands as: what it stands for to its symbol."""


def polynomial(expression: Any, unknowns: Unknowns) -> Any:
    """Return an expression of sizes with unknowns, which grow, for all but sums, products, powers, whole quotients."""
    if isinstance(expression, sympy.Number | sympy.Symbol):
        return expression
    power = isinstance(expression, sympy.Pow) and expression.args[1].is_Integer
    if power or isinstance(expression, sympy.Add | sympy.Mul):
        return expression.func(*(polynomial(arg, unknowns) for arg in expression.args))
    if expression not in unknowns and type(expression).__name__ == "FloorDiv":
        quotient = _quotient(*(polynomial(arg, unknowns) for arg in expression.args))
        if quotient is not None:
            return quotient
    if expression not in unknowns:
        unknowns[expression] = sympy.Symbol(f"_{len(unknowns)}", integer=expression.is_integer)
    return unknowns[expression]


def quick_simplification() -> Patch:
    """Return a patch of sympy's `simplify` that does not look into the unknowns.

    Torch calls it for each division of sizes with a common factor. Source: torch 2.13,
    `torch/utils/_sympy/functions.py`, `FloorDiv.eval`.
    """
    simplify = sympy.simplify

    def simplified(expression: Any, **options: Any) -> Any:
        if not isinstance(expression, sympy.Expr):
            return simplify(expression, **options)
        unknowns: Unknowns = {}
        simple = simplify(polynomial(expression, unknowns), **options)
        return simple.xreplace({symbol: term for term, symbol in unknowns.items()})

    return Patch(sympy, "simplify", simplified, "Simplify nested divisions of sizes in linear time")


def holds_always(condition: Any) -> bool:
    """Tell whether algebra alone makes a condition on integer sizes true.

    Decides equations of polynomials and remainders of multiples, alone or within `Or` and `And`.
    """
    if isinstance(condition, sympy.Or | sympy.And):
        return (any if isinstance(condition, sympy.Or) else all)(map(holds_always, condition.args))
    if not isinstance(condition, sympy.Eq):
        return False
    unknowns: Unknowns = {}
    left, right = condition.args
    if right == 0 and type(left).__name__ in ("Mod", "PythonMod"):
        dividend, divisor = (polynomial(arg, unknowns) for arg in left.args)
        return _quotient(dividend, divisor) is not None
    left, right = (polynomial(side, unknowns) for side in (left, right))
    return _integers(left, right) and sympy.expand(left - right) == 0


def _integers(*expressions: Any) -> bool:
    """Tell whether all unknowns are integers, and no coefficient is a floating-point number."""
    return all(
        not expression.has(sympy.Float) and all(symbol.is_integer for symbol in expression.free_symbols)
        for expression in expressions
    )


def _quotient(dividend: Any, divisor: Any) -> Any | None:
    """Return what a polynomial of integers is a multiple of another by, with integer coefficients; None: it is not."""
    symbols = sorted(divisor.free_symbols | dividend.free_symbols, key=str)
    if not symbols or not _integers(dividend, divisor):
        return None
    try:
        quotient, rest = sympy.div(dividend, divisor, *symbols, domain="ZZ")
    except sympy.PolynomialError:
        return None
    return quotient if rest == 0 else None
