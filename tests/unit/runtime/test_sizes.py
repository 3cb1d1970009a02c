"""Size expressions in words, and their values; `tests/property` has the rest."""

import pytest

from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.values.sizes import SCOPE, check_size, condition_source, describe, evaluate, source, symbols_of


def size(op, *args):
    return SizeExpression(op=op, args=args)


VALUES = [
    (size("add", "a", 1, -2), 4, "(a + 1 + -2)"),
    (size("mul", "a", "b"), 15, "(a * b)"),
    (size("floordiv", -7, 2), -4, "(-7 // 2)"),
    (size("mod", -7, 3), 2, "(-7 % 3)"),
    (size("pow", -2, 2), 4, "(-2 ** 2)"),
    (size("ceildiv", -7, 2), -3, "ceildiv(-7, 2)"),
    (size("trunc", size("max", (1 << 53) + 1, 2.5)), 1 << 53, "trunc(max(9007199254740993, 2.5))"),
    (size("trunc", size("where", 1, (1 << 53) + 1, 2.5)), 1 << 53, "trunc(where(1, 9007199254740993, 2.5))"),
    (size("eq", "a", 5), 1, "(a == 5)"),
    (size("lt", "a", 5), 0, "(a < 5)"),
    (size("and", 0, size("floordiv", 1, 0)), 0, "(0 and (1 // 0))"),
    (size("or", 1, size("floordiv", 1, 0)), 1, "(1 or (1 // 0))"),
    (size("not", "a"), 0, "not(a)"),
    (size("where", 1, "a", size("floordiv", 1, 0)), 5, "where(1, a, (1 // 0))"),
]


@pytest.mark.parametrize(("expression", "value", "words"), VALUES, ids=[words for *_, words in VALUES])
def test_expression_has_its_value_in_every_form(expression, value, words):
    symbols = {"a": 5, "b": 3}
    assert evaluate(expression, symbols) == value
    for make, expected in ((source, value), (condition_source, bool(value))):
        made = eval(make(expression, lambda symbol: f"symbols[{symbol!r}]"), {**SCOPE, "symbols": symbols})
        assert (made if make is source else bool(made)) == expected
    assert describe(expression) == words


@pytest.mark.parametrize("expression", [size("where", "a", 2, 2.5), size("add", "a", 0.5), size("mul", 1.5, "b")])
def test_size_that_is_a_float_is_refused_and_a_whole_one_of_it_is_not(expression):
    check_size(size("trunc", expression), {"a", "b"}, where=Place("file"))
    check_size(size("where", size("lt", 0.5, "a"), "a", "b"), {"a", "b"}, where=Place("file"))
    with pytest.raises(BundleInvalid, match="a size expression is a float, and a size an integer"):
        check_size(expression, {"a", "b"}, where=Place("file"))


def test_symbols_are_found_and_shown_by_the_users_names():
    expression = size("add", "s0", size("mul", "s1", "s0"))
    assert symbols_of(expression) == {"s0", "s1"}
    assert describe(expression, {"s0": "batch"}) == "(batch + (s1 * batch))"
