"""Repeated symbolic arithmetic: computed once, and again when the environment has learned something."""

import pytest
from torch._dynamo.source import ConstantSource  # noqa: TID251
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv  # noqa: TID251

from aotexport.torch_internals.symbolic_memo import computed_once


@pytest.fixture
def environment():
    return ShapeEnv()


def size(environment, value, name):
    source = ConstantSource(name)
    symbol = environment.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=value, source=source)


@pytest.mark.parametrize("operation", [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a // b, lambda a, b: a - b])
def test_results_hold_what_torch_computes(environment, operation):
    a, b = size(environment, 12, "a"), size(environment, 5, "b")
    expected = operation(a, b).node
    with computed_once(environment):
        first, second = operation(a, b).node, operation(a, b).node
    for node in (first, second):
        assert (node.expr, node.pytype, node.hint) == (expected.expr, expected.pytype, expected.hint)


def test_result_is_computed_again_when_two_sizes_are_found_equal(environment):
    a, b = size(environment, 5, "a"), size(environment, 5, "b")
    with computed_once(environment):
        before = (a - b).node
        assert a == b
        after = (a - b).node
    assert before is not after
    assert after.expr == 0


def test_number_that_a_size_is_found_equal_to_is_known(environment):
    a = size(environment, 5, "a")
    with computed_once(environment):
        assert (a * 2).node.maybe_as_int() is None
        assert a == 5
        assert (a * 2).node.maybe_as_int() == 10
