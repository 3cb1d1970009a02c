"""Size expressions: wrong operands, absurd depth and length, values without bound."""

import pytest

from tests.hostile.crafted import Crafted


def _size(op: str, *args):
    return {"op": op, "args": list(args)}


def _nested(levels: int):
    size = "s33"
    for _ in range(levels):
        size = _size("add", size, 1)
    return size


def _power(levels: int):
    size = "s33"
    for _ in range(levels):
        size = _size("pow", size, 64)
    return size


FAULTS = [
    (_size("add", 1), "size operator `add` takes two or more operands, got 1"),
    (_size("min"), "size operator `min` takes two or more operands, got 0"),
    (_size("not", 1, 2), "size operator `not` takes 1 operands, got 2"),
    (_size("where", 1, 2), "size operator `where` takes 3 operands, got 2"),
    (_size("floordiv", 1), "size operator `floordiv` takes 2 operands, got 1"),
    (_size("floordiv", "s33", 0), "size operator `floordiv` divides by zero"),
    (_size("mod", "s33", 0), "size operator `mod` divides by zero"),
    (_size("ceildiv", "s33", 0), "size operator `ceildiv` divides by zero"),
    (_size("pow", 2, 10**9), "the exponent of a size is no integer from 0 to 64"),
    (_size("pow", 2, -1), "the exponent of a size is no integer from 0 to 64"),
    (_size("pow", 2, "s33"), "the exponent of a size is no integer from 0 to 64"),
    (_power(2), "a size expression may have values of more than 1024 bits"),
    (_size("mul", *["s33"] * 17), "a size expression may have values of more than 1024 bits"),
    (_size("eq", "s99", 1), "unknown symbol 's99' in a size"),
    (_size("eq", "__import__('os')", 1), "unknown symbol \"__import__('os')\" in a size"),
    (_size("eq", 1 << 63, 1), "an integer of a size has more than 64 bits"),
    (_size("add", *[1] * 600), "a size expression has 601 terms; at most 500 are read"),
]


@pytest.mark.parametrize(("size", "message"), FAULTS, ids=[message for _, message in FAULTS])
@pytest.mark.parametrize("place", ["guards", "inputs/3/meta/shape/0", "functional/gradients/tangents/0/meta/offset"])
def test_program_with_an_unsound_size_is_refused(crafted: Crafted, place, size, message):
    crafted.put("program", place, [size] if place == "guards" else size)
    assert crafted.refusal() == f"programs/train/program.json: {message}"


@pytest.mark.parametrize(("size", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_argument_with_an_unsound_size_is_refused(crafted: Crafted, size, message):
    crafted.node("forward", op="aten::zeros.default", args=[[{"kind": "size", "value": size}]])
    assert crafted.refusal() == f"programs/train/forward.json: {message}"


def test_size_that_is_nested_deeply_is_refused(crafted: Crafted):
    crafted.put("program", "guards", [_nested(32)])
    assert crafted.refusal() == "programs/train/program.json: nested deeper than 64 levels"


def test_size_operator_that_is_unknown_is_refused(crafted: Crafted):
    crafted.put("program", "guards", [_size("eval", 1)])
    assert crafted.refusal() == "programs/train/program.json: Invalid enum value 'eval' - at `$.guards[0].op`"
