"""Safetensors files that lie, and state that reaches outside of what they store."""

import json
import struct

import pytest

from aotexport_runtime import BundleInvalid, load, selftest
from tests.hostile.crafted import Crafted
from tests.refusals import refusal

FILE = "weights/model.safetensors"
PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
STATE = {"name": "w", "role": "buffer", "file": "weights/extra.safetensors", "key": "pair", "dtype": "float32"}
STATE |= {"shape": [2], "stride": [1]}
SPAN = {**STATE, "whole": False}


def _file(header: object, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _refusal(crafted: Crafted, mapped: bool) -> str:
    return refusal(BundleInvalid, load, crafted.seal(), mapped=mapped)


def _add(crafted: Crafted, header: object, state: dict[str, object], data: bytes = bytes(8)) -> None:
    crafted.write("weights/extra.safetensors", _file(header, data))
    crafted.put("manifest", "files/-", {"path": "weights/extra.safetensors", "nbytes": 0, "sha256": ""})
    crafted.put("manifest", "state/-", state)


BROKEN = {
    "empty": (b"", "header too small"),
    "overlapping": (
        _file({"a": PAIR, "b": {**PAIR, "data_offsets": [4, 12]}}, bytes(12)),
        "invalid offset for tensor `b`",
    ),
    "shape_that_is_larger_than_its_data": (
        _file({"a": {**PAIR, "shape": [3]}}),
        "invalid shape, data type, or offset for tensor",
    ),
    "overflowing": (
        _file({"a": {**PAIR, "shape": [1 << 62, 1 << 62]}}),
        "overflow computing buffer size from shape and/or element type",
    ),
}


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_safetensors_file_is_refused(crafted: Crafted, data, reason):
    crafted.write(FILE, data)
    messages = {_refusal(crafted, mapped) for mapped in (True, False)}
    assert messages == {f"{FILE}: not a safetensors file: Error while deserializing header: {reason}"}


def test_key_that_the_file_lacks_is_refused(crafted: Crafted):
    crafted.put("manifest", "state/0/key", "nothing")
    assert _refusal(crafted, mapped=False) == f"{FILE}: no tensor 'nothing'"
    assert _refusal(crafted, mapped=True) == f"{FILE}: no tensor 'nothing': File does not contain tensor nothing"


STATES = {
    "another_dtype": (PAIR, {**STATE, "dtype": "int32"}, "'pair' is float32, not int32"),
    "another_shape": (PAIR, {**STATE, "shape": [1, 2], "stride": [2, 1]}, "'pair' has shape [2], not [1, 2]"),
    "span_past_the_end": (PAIR, {**SPAN, "shape": [3]}, "state 'w' reaches past the end of 'pair'"),
    "stride_past_the_end": (PAIR, {**SPAN, "stride": [2]}, "state 'w' reaches past the end of 'pair'"),
    "complex_of_no_pairs": (
        {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        {**STATE, "dtype": "complex64"},
        "'pair' is float32, not complex64",
    ),
}


@pytest.mark.parametrize(("header", "state", "message"), STATES.values(), ids=STATES)
@pytest.mark.parametrize("mapped", [True, False])
def test_state_that_does_not_fit_its_file_is_refused(crafted: Crafted, mapped, header, state, message):
    _add(crafted, {"pair": header}, state, bytes(header["data_offsets"][1]))
    assert _refusal(crafted, mapped) == f"weights/extra.safetensors: {message}"


@pytest.mark.parametrize("mapped", [True, False])
def test_dtype_that_the_format_lacks_is_refused(crafted: Crafted, mapped):
    header = {"pair": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    _add(crafted, header, {**STATE, "shape": [4]}, bytes(3))
    reason = "no tensor 'pair': Dtype not understood: F6_E2M3" if mapped else "dtype F6_E2M3 is none of the format's"
    assert _refusal(crafted, mapped) == f"weights/extra.safetensors: {reason}"


def test_recorded_tensors_that_are_no_safetensors_file_are_refused(crafted: Crafted):
    crafted.write("testvectors/train.example.safetensors", b"")
    with pytest.raises(BundleInvalid) as caught:
        selftest(crafted.seal())
    reason = "not a safetensors file: Error while deserializing: header too small"
    assert str(caught.value) == f"testvectors/train.example.safetensors: {reason}"
