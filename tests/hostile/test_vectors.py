"""Recorded calls that never end, or whose arguments reach outside of what is stored."""

import pytest

from aotexport_runtime import BundleInvalid, selftest
from tests.hostile.crafted import Crafted

RECORD = "testvectors/train.example.json"

FAULTS = [
    ("program", "infer", "it is of program 'infer', not `train`"),
    ("calls", 10**9, "`Vector.calls` is 1000000000; at most 100 is read"),
    ("calls", -1, "`Vector.calls` is -1; at least 0 is expected"),
    ("inputs", [], "0 arguments; the program takes 1"),
    ("inputs/0/path", "\x1b]", r"`VectorInput.path` '\x1b]' is too long or not printable"),
    ("inputs/0/stride", [1], "argument 'x' has 2 sizes and 1 strides; at most 64 are read"),
    ("inputs/0/offset", -1, "argument 'x' has negative sizes, strides or offset"),
    ("inputs/0/offset", 1, "argument 'x' reaches past the end of 'input0'"),
    ("inputs/0/shape", [1 << 20, 4], "argument 'x' reaches past the end of 'input0'"),
    ("inputs/0/key", "nothing", "argument 'x' reaches past the end of 'nothing'"),
    ("values", ["a", "a"], "`Vector.values` 'a' occurs twice"),
    ("eager_errors", {"a": 1.0}, "`Vector.eager_errors` 'a' is not in `Vector.values`"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS, ids=[f"{p}:{m[:40]}" for p, _, m in FAULTS])
def test_recorded_call_with_a_fault_is_refused(crafted: Crafted, path, value, message):
    crafted.put("vector", path, value)
    with pytest.raises(BundleInvalid) as caught:
        selftest(crafted.seal())
    assert str(caught.value) == f"{RECORD}: {message}"


def test_argument_that_repeats_a_few_elements_without_end_is_refused(crafted: Crafted):
    crafted.put("vector", "inputs/0/shape", [1 << 20, 1 << 20])
    crafted.put("vector", "inputs/0/stride", [0, 0])
    with pytest.raises(BundleInvalid) as caught:
        selftest(crafted.seal())
    assert str(caught.value) == f"{RECORD}: argument 'x' repeats 'input0' too often"


def test_recorded_value_that_is_not_stored_is_refused(crafted: Crafted):
    values = [f"value {index}" for index in range(99)]
    count = len(crafted.document("vector")["values"])
    crafted.put("vector", "values", values)
    with pytest.raises(BundleInvalid) as caught:
        selftest(crafted.seal())
    assert str(caught.value) == f"testvectors/train.example.json: no tensor of 'value {count}'"


def test_recorded_tensors_that_are_no_safetensors_file_are_refused(crafted: Crafted):
    crafted.write("testvectors/train.example.safetensors", b"")
    with pytest.raises(BundleInvalid) as caught:
        selftest(crafted.seal())
    reason = "not a safetensors file: Error while deserializing: header too small"
    assert str(caught.value) == f"testvectors/train.example.safetensors: {reason}"
