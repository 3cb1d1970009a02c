"""Arithmetic of sizes with unknowns in place of divisions."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from aotexport.process.patches import patched
from aotexport.values.polynomials import holds_always, quick_simplification

A, B = sympy.symbols("a b", integer=True, positive=True)
HALF = FloorDiv(A + 1, 2)
REAL = sympy.Symbol("zf0", real=True)


def equal(left, right):
    return sympy.Eq(left, right, evaluate=False)


@pytest.mark.parametrize(
    "condition",
    [
        equal(A * (B + 1), A * B + A),
        equal(HALF * (B + 1), HALF * B + HALF),
        equal(Mod(4 * HALF * B + 8 * HALF, HALF, evaluate=False), 0),
        equal(FloorDiv(3 * (2 * HALF + 2) * B, 2, evaluate=False), 3 * (HALF + 1) * B),
        equal(FloorDiv(A * B + A, A, evaluate=False), B + 1),
        sympy.Or(equal(A, 1), equal(Max(A, B) * 2, Max(A, B) + Max(A, B)), evaluate=False),
        sympy.And(equal(A + B, B + A), equal(2 * A, A + A), evaluate=False),
    ],
)
def test_identities_hold(condition):
    assert holds_always(condition)


@pytest.mark.parametrize(
    "condition",
    [
        equal(HALF * 2, A + 1),
        equal(HALF, FloorDiv(A + 3, 2)),
        equal(FloorDiv(3 * (2 * HALF + 1) * B, 2, evaluate=False), 3 * HALF * B),
        equal(Mod(3 * A, 2 * A, evaluate=False), 0),
        equal(Mod(4 * A, A, evaluate=False), 1),
        equal(REAL * (A + 1), REAL * A + REAL),
        equal(0.5 * A + 0.5 * A, 1.0 * A),
        sympy.Or(equal(A, 1), equal(B, 1)),
        sympy.And(equal(A, 1), equal(2 * A, A + A), evaluate=False),
        A < B,
    ],
)
def test_conditions_that_say_something_are_kept(condition):
    assert not holds_always(condition)


@pytest.mark.parametrize(
    ("expression", "expected"), [((4 * HALF * B + 8 * HALF) / (4 * HALF), B + 2), ((A**2 + A) / A, A + 1), (HALF, HALF)]
)
def test_simplified_expression_has_its_terms_back(expression, expected):
    with patched(quick_simplification()):
        assert sympy.simplify(expression) == expected
