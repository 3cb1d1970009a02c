"""Requests and answers of the protocol as bytes; what servers refuse is in `tests/serving`."""

import json

import numpy as np
import pytest

from aotexport_runtime.errors import CallInvalid, DeadlinePassed, Overloaded
from aotexport_runtime.server.messages import Request, Signature, read_request, write_answer
from aotexport_runtime.server.refusals import CODES, Refusal, refusal_of
from aotexport_runtime.serving.interface import TensorSpec
from tests.refusals import refusal

SPECS = [
    TensorSpec(name=name, dtype=dtype, shape=(-1,), index=index)
    for index, (name, dtype) in enumerate(
        [("x", "float32"), ("b", "bfloat16"), ("h", "float16"), ("f", "bool"), ("i", "uint8")]
    )
]
SIGNATURE = Signature.of(SPECS, SPECS)
VALUES = {
    "x": np.array([1.5, -2], np.float32),
    "b": np.array([1.5, -2, 3], np.float32),
    "h": np.array([1.5], np.float16),
    "f": np.array([True, False, True]),
    "i": np.array([0, 255], np.uint8),
}


def test_binary_answer_that_is_sent_back_is_the_same_request():
    asked = read_request(
        bytearray(b'{"inputs": [], "parameters": {"binary_data_output": true}}'), None, SIGNATURE, "me"
    )
    assert asked.id == "me"
    body, json_nbytes = write_answer(asked, "model", "3", VALUES, SIGNATURE)
    assert json_nbytes is not None
    head = json.loads(body[:json_nbytes])
    assert (head["model_name"], head["model_version"], head["id"]) == ("model", "3", "me")
    assert [output["datatype"] for output in head["outputs"]] == ["FP32", "BF16", "FP16", "BOOL", "UINT8"]
    sent = json.dumps({"id": "you", "inputs": head["outputs"]}).encode() + body[json_nbytes:]
    wanted = read_request(bytearray(sent), len(sent) - len(body) + json_nbytes, Signature.of(SPECS, SPECS[:1]))
    assert wanted.id == "you"
    for name, value in VALUES.items():
        np.testing.assert_array_equal(wanted.inputs[name], value)
        assert wanted.inputs[name].dtype == value.dtype
        assert wanted.inputs[name].flags.aligned


def test_json_answer_has_numbers():
    asked = read_request(bytearray(b'{"inputs": [], "outputs": [{"name": "f"}, {"name": "x"}]}'), None, SIGNATURE)
    body, json_nbytes = write_answer(asked, "model", "1", VALUES, SIGNATURE)
    assert json_nbytes is None
    assert [output["data"] for output in json.loads(body)["outputs"]] == [[True, False, True], [1.5, -2.0]]


@pytest.mark.parametrize("data", [[256], [-1], [2**70], [0.0], [True], ["1"]])
def test_numbers_that_a_datatype_does_not_have_are_refused(data):
    entry = {"name": "i", "datatype": "UINT8", "shape": [1], "data": data}
    with pytest.raises(Refusal, match=r"^`i`: (UINT8 goes from 0 to 255|its data are no numbers of UINT8)$"):
        read_request(bytearray(json.dumps({"inputs": [entry]}).encode()), None, SIGNATURE)


@pytest.mark.parametrize(
    ("error", "http", "grpc"),
    [
        (CallInvalid("infer", ["`x`: missing"]), 400, "INVALID_ARGUMENT"),
        (IndexError("out of range"), 400, "INVALID_ARGUMENT"),
        (Overloaded("full"), 429, "RESOURCE_EXHAUSTED"),
        (DeadlinePassed("late"), 504, "DEADLINE_EXCEEDED"),
        (RuntimeError("no memory"), 500, "INTERNAL"),
    ],
)
def test_errors_of_calls_have_the_codes_of_the_protocol(error, http, grpc, caplog):
    refusal = refusal_of(error)
    assert CODES[refusal.kind] == (http, grpc)
    assert "\n" not in str(refusal)
    tracebacks = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert tracebacks == ([error] if http == 500 else [])


@pytest.mark.parametrize("timeout", [0, True, 1.5, "1", 10**400])
def test_timeout_that_is_no_number_of_microseconds_is_refused(timeout):
    with pytest.raises(Refusal, match=r"^the body is no inference request: (Expected `int|Number out of range)"):
        read_request(bytearray(json.dumps({"inputs": [], "parameters": {"timeout": timeout}}).encode()), None, SHAPED)


EMPTY = {"name": "b", "datatype": "BF16", "parameters": {"binary_data_size": 0}}
NUMBERS = {"name": "x", "datatype": "FP32", "shape": [1]}
SHAPED = Signature(inputs={"b": ("BF16", (-1, -1)), "f": ("BOOL", (2,)), "x": ("FP32", (1,))}, outputs={})


@pytest.mark.parametrize(
    ("entry", "data", "reason"),
    [
        (EMPTY | {"shape": [0, 2**62]}, b"", "`b`: no tensor has the shape [0, 4611686018427387904]"),
        (
            {"name": "f", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}},
            b"\1\2",
            "`f`: bytes of BOOL are 0 and 1",
        ),
        (NUMBERS | {"data": [10**400]}, b"", "`x`: one of its data is beyond FP32"),
        (
            NUMBERS | {"data": 5},
            b"",
            "the body is no inference request: Expected `array`, got `int` - at `$.inputs[0].data`",
        ),
        # Of numpy's strings each would take 8 MB.
        (
            NUMBERS | {"data": ["x" * 2_000_000, *[""] * 50_000]},
            b"",
            "`x`: FP32[1] takes 1 numbers, and there are 50001",
        ),
        (
            NUMBERS | {"parameters": {"binary_data_size": True}},
            b"1",
            "the body is no inference request: Expected `int | null`, got `bool` - at "
            "`$.inputs[0].parameters.binary_data_size`",
        ),
    ],
)
def test_values_that_no_tensor_holds_are_refused(entry, data, reason):
    head = json.dumps({"inputs": [entry]}).encode()
    assert refusal(Refusal, read_request, bytearray(head + data), len(head), SHAPED) == reason


def test_large_answer_is_written_in_pieces_of_the_same_json():
    values = np.arange(150_000, dtype=np.float32).reshape(2, -1) / 7
    signature = Signature(inputs={}, outputs={"y": ("FP32", (-1, -1))})
    asked = Request(id="x", inputs={}, outputs={"y": False})
    for array in (values, values[:, :0]):
        body, length = write_answer(asked, "model", "1", {"y": array}, signature)
        assert length is None
        assert json.loads(body)["outputs"][0]["data"] == array.ravel().tolist()


@pytest.mark.parametrize("indent", [None, 1])
def test_large_request_is_read_in_pieces_as_the_same_numbers(indent):
    values = np.arange(60_000, dtype=np.float32).reshape(3, 10_000, 2) / 7
    entry = {"name": "x", "datatype": "FP32", "shape": values.shape, "data": values.tolist()}
    signature = Signature(inputs={"x": ("FP32", (-1, -1, -1))}, outputs={})
    for data in (values.tolist(), values.ravel().tolist()):
        body = json.dumps({"inputs": [entry | {"data": data}]}, indent=indent).encode()
        np.testing.assert_array_equal(read_request(bytearray(body), None, signature).inputs["x"], values)
