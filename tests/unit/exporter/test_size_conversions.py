"""Calls of `int` and `float` in a model's code, which keep symbolic numbers while it is traced."""

from __future__ import annotations

import functools
import threading
from types import FunctionType, SimpleNamespace

import pytest
import torch

from aotexport.capture.effects.size_conversions import calls_replaced
from aotexport.process.patches import patched
from aotexport.torch_internals.names import ShapeEnv


@pytest.fixture
def size():
    """A symbolic size."""
    return ShapeEnv().create_unbacked_symint()


def listed(values):
    return [int(value) for value in values]


def later(values):
    yield from (float(value) for value in values)


def nested(value, depth=2):
    return nested(value, depth - 1) if depth else float(value)


def other_uses(value):
    same = SimpleNamespace(int=value, float=value)
    return same.int, same.float, [*map(int, ("1", True))], type(value) is int, int("f", 16)


@functools.lru_cache
def remembered(text):
    return lambda value: int(text, 16) + int(value)


class Owner:
    size = 3

    @staticmethod
    def static(value):
        return int(value)

    @classmethod
    def of_class(cls, value):
        return int(value)

    @property
    def value(self):
        return int(self.size)


FUNCTIONS = (listed, later, nested, other_uses, remembered, Owner().of_class, *vars(Owner).values())


def test_conversions_keep_symbols_in_every_form_of_a_function(size):
    owner = Owner()
    owner.size = size
    with patched(*calls_replaced(FUNCTIONS)):
        kept = [*listed([size]), owner.static(size), owner.of_class(size), owner.value]
        computed = [*later([size]), nested(size), remembered("a")(size)]
    remembered.cache_clear()
    assert all(value is size for value in kept)
    assert [type(value) for value in computed] == [torch.SymFloat, torch.SymFloat, torch.SymInt]


def test_float_is_truncated_as_eager_does():
    half = torch.sym_float(ShapeEnv().create_unbacked_symint()) / 2
    with patched(*calls_replaced([listed])):
        (whole,) = listed([half])
    assert "Trunc" in str(whole)


def test_other_uses_of_the_names_and_other_values_are_as_before():
    before = other_uses(5), listed([1.5, "2", True]), [*later(["nan", 2])][1:]
    with patched(*calls_replaced(FUNCTIONS)):
        assert (other_uses(5), listed([1.5, "2", True]), [*later(["nan", 2])][1:]) == before
        with pytest.raises(ValueError, match="invalid literal for int"):
            listed(["x"])


def test_what_outlives_the_patches_converts_as_before(size):
    with patched(*calls_replaced(FUNCTIONS)):
        closure, generator = remembered("b"), later([1, 2])
        assert next(generator) == 1.0
        held = closure(size)
    remembered.cache_clear()
    assert (closure(4), [*generator], type(held)) == (15, [2.0], torch.SymInt)


def test_other_threads_ask_for_the_value(size):
    found = []

    def convert():
        try:
            listed([size])
        except Exception as error:
            found.append(type(error).__name__)

    with patched(*calls_replaced(FUNCTIONS)):
        thread = threading.Thread(target=convert)
        thread.start()
        thread.join()
    assert found == ["GuardOnDataDependentSymNode"]


def test_code_is_put_back():
    before = [listed.__code__, nested.__code__, other_uses.__code__]
    with patched(*calls_replaced(FUNCTIONS)):
        assert listed.__code__ is not before[0]
    assert all(now.__code__ is code for now, code in zip((listed, nested, other_uses), before, strict=True))


def test_module_with_a_name_of_its_own_is_left_alone():
    own = FunctionType(listed.__code__, {"int": str})
    assert [*calls_replaced([own])] == []


def test_function_that_wraps_itself_is_found_once():
    def scaled(value):
        return float(value)

    scaled.__wrapped__ = scaled
    assert [patch.owner for patch in calls_replaced([scaled])] == [scaled]
