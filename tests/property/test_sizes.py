"""Size expressions: their values are those of sympy, and accepted ones stay small."""

from typing import Any

import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import (
    CeilDiv,
    CeilToInt,
    FloatPow,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    OpaqueUnaryFn_sqrt,
    PowByNatural,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
    Where,
)

from aotexport.values.sizes import encode_expression
from aotexport_runtime import BundleInvalid
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.values.sizes import MAX_NBITS, UNDEFINED, check_size, evaluate, symbols_of
from tests.property.profile import quick

NAMES = ("a", "b")
NARY = ("add", "mul", "min", "max", "and", "or")
BINARY = ("floordiv", "mod", "ceildiv", "eq", "ne", "lt", "le")


def _expressions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(ops: Any, *args: Any) -> st.SearchStrategy[Any]:
        return st.builds(lambda op, args: SizeExpression(op=op, args=tuple(args)), ops, st.tuples(*args))

    return st.one_of(
        make(st.sampled_from(NARY), inner, inner),
        make(st.sampled_from(NARY), inner, inner, inner),
        make(st.sampled_from(BINARY), inner, inner),
        make(st.just("pow"), inner, st.integers(0, 3)),
        make(st.just("not"), inner),
        make(st.just("where"), inner, inner, inner),
        make(st.sampled_from(("trunc", "floor", "ceil", "round")), _floats(inner)),
    )


def _floats(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(op: Any, *args: Any) -> st.SearchStrategy[Any]:
        return st.builds(lambda *args: SizeExpression(op=op, args=args), *args)

    constants = st.floats(-8, 8)
    return st.one_of(
        make("truediv", inner, inner),
        make("sqrt", inner),
        make("add", make("float", inner), constants),
        make("mul", constants, inner, constants),
        make("pow", make("float", inner), constants),
        make("max", inner, constants),
    )


sizes = st.recursive(st.integers(-9, 9) | st.sampled_from(NAMES), _expressions, max_leaves=12)


def value_or_error(compute: Any) -> Any:
    try:
        return compute()
    except UNDEFINED:
        return "undefined"


@quick
@given(sizes, st.fixed_dictionaries({name: st.integers(-(1 << 63), (1 << 63) - 1) for name in NAMES}))
def test_size_that_is_accepted_has_no_large_value_for_any_symbols(size, symbols):
    try:
        check_size(size, set(NAMES), where=Place("test"))
    except BundleInvalid:
        return
    value = value_or_error(lambda: evaluate(size, symbols))
    assert value == "undefined" or abs(value).bit_length() <= MAX_NBITS


@quick
@given(sizes)
def test_size_is_accepted_only_if_its_symbols_are_known(size):
    known = symbols_of(size)
    for missing in known:
        try:
            check_size(size, known - {missing}, where=Place("test"))
        except BundleInvalid:
            continue
        raise AssertionError(f"{missing} is unknown")


# --- sympy ------------------------------------------------------------------------------------------------

SYMBOLS = {name: sympy.Symbol(name, positive=True, integer=True) for name in NAMES}


def _is_an_integer(value):
    """Return whether no part of an expression is 0.0, which `FloorToInt` leaves as it is from torch 2.14 on."""
    return not any(isinstance(part, sympy.Float) and not part for part in sympy.preorder_traversal(value))


def _natural(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Build larger non-negative expressions, with the functions of torch's shape environment."""
    divisor = st.integers(1, 7).map(sympy.Integer)
    return st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
        st.tuples(inner, inner).map(lambda pair: Max(*pair)),
        st.tuples(inner, inner).map(lambda pair: Min(*pair)),
        st.tuples(inner, divisor).map(lambda pair: FloorDiv(*pair)),
        st.tuples(inner, divisor).map(lambda pair: CeilDiv(*pair)),
        st.tuples(inner, divisor).map(lambda pair: Mod(*pair)),
        st.tuples(inner, divisor).map(lambda pair: PythonMod(*pair)),
        st.tuples(inner, st.integers(1, 3)).map(lambda pair: pair[0] ** pair[1]),
        st.tuples(inner, st.integers(1, 3)).map(lambda pair: PowByNatural(pair[0], sympy.Integer(pair[1]))),
        st.tuples(inner, inner, inner).map(lambda triple: Where(sympy.Lt(triple[0], triple[1]), triple[1], triple[2])),
        st.tuples(inner, divisor).map(lambda pair: TruncToInt(IntTrueDiv(*pair))),
        st.tuples(inner, st.floats(0.25, 4)).map(lambda pair: RoundToInt(ToFloat(pair[0]) * sympy.Float(pair[1]))),
        inner.map(lambda value: FloorToInt(FloatPow(ToFloat(value), sympy.Float(0.5)))),
        inner.map(lambda value: CeilToInt(OpaqueUnaryFn_sqrt(ToFloat(value)))),
    ).filter(_is_an_integer)


naturals = st.recursive(
    st.integers(0, 9).map(sympy.Integer) | st.sampled_from(list(SYMBOLS.values())), _natural, max_leaves=8
)
relations = st.builds(
    lambda relation, a, b: relation(a, b),
    st.sampled_from([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge]),
    naturals,
    naturals,
)
truths = st.recursive(
    relations,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: sympy.And(*pair)),
        st.tuples(inner, inner).map(lambda pair: sympy.Or(*pair)),
        inner.map(sympy.Not),
    ),
    max_leaves=4,
)
positive = st.fixed_dictionaries({name: st.integers(1, 50) for name in NAMES})


@quick
@given(naturals | truths, positive)
def test_encoded_expression_has_the_value_that_sympy_gives(expression, symbols):
    expected = expression.subs({SYMBOLS[name]: value for name, value in symbols.items()})
    size = encode_expression(expression)
    check_size(size, set(NAMES), where=Place("test"))
    assert evaluate(size, symbols) == int(bool(expected) if expected in (sympy.true, sympy.false) else expected)
