"""Text that a model's code makes: shown to people, or computed with."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest
import torch

from aotexport.capture.effects.arithmetic import is_message

found: list[bool] = []


class Number:
    """Records whether a message is made of it."""

    def __repr__(self):
        found.append(is_message(sys._getframe(1)))
        return "6"

    def __format__(self, spec):
        found.append(is_message(sys._getframe(1)))
        return "6"


NUMBER = Number()
TABLE = {"6": 1}
LOGGER = logging.getLogger("texts")


def asserted():
    torch._assert(True, f"expected 6, got {NUMBER}" + " of it")


def converted():
    torch._assert(True, message="got " + str(NUMBER))


def over_lines():
    LOGGER.debug(
        f"one of {NUMBER:d} "
        f"and {NUMBER!r}",
    )  # fmt: skip


def warned():
    warnings.warn(str(NUMBER), UserWarning, stacklevel=2)


def a_key():
    return TABLE[f"{NUMBER}"]


def key_of_an_assertion():
    torch._assert(TABLE.get(f"{NUMBER}") == 1, "another")


def kept():
    return print(f"{NUMBER}", file=sys.stderr)


def an_own_function():
    hasattr(TABLE, f"{NUMBER}")


@pytest.mark.parametrize("function", [asserted, converted, over_lines])
def test_text_that_a_statement_shows_is_a_message(function):
    found.clear()
    function()
    assert set(found) == {True}


def test_text_of_a_warning_is_a_message():
    found.clear()
    with pytest.warns(UserWarning, match="6"):
        warned()
    assert found == [True]


@pytest.mark.parametrize("function", [a_key, key_of_an_assertion, kept, an_own_function])
def test_other_text_is_none(function):
    found.clear()
    function()
    assert set(found) == {False}


def test_text_of_code_without_source_is_none():
    found.clear()
    exec(compile("print(f'{number}')", "<string>", "exec"), {"number": NUMBER})
    assert found == [False]
