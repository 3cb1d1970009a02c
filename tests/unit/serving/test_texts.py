"""Strings of a signature: calls name them, and choose by them among the programs that were captured."""

import json

import numpy as np
import pytest
import torch

import aotexport
from aotexport_runtime.errors import CallInvalid
from aotexport_runtime.server.messages import Signature, read_request, write_call
from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.serving.servable import Servable
from tests.refusals import refusal
from tests.unit.serving.conftest import BATCH

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3) ** 2


class Scaled(torch.nn.Module):
    """Scales rows as its options say: each by itself, or by the mean of all."""

    def forward(self, x, options):
        return x * 2 if options["how"] == "double" else x - x.mean(dim=0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "scaled"
    sizes = {"x": {0: BATCH}, "options": {"how": None}}
    example, other = ((torch.from_numpy(X), {"how": how}) for how in ("double", "centre"))
    aotexport.export(
        Scaled(), example, output=path, dynamic_shapes=sizes, programs=("infer",), variants=[other], onnx=True
    )
    return path


@pytest.fixture(params=["auto", "onnx"])
def servable(request, bundle):
    servable = Servable(bundle, engine=request.param, max_latency_ms=50)
    servable.warm_up()
    yield servable
    servable.close()


def expected(how):
    return Scaled()(torch.from_numpy(X), {"how": how}).numpy()


def test_call_chooses_a_program_by_the_string_that_it_names(servable):
    assert [(text.name, text.values) for text in servable.texts] == [("options.how", ("double", "centre"))]
    assert servable.recorded_call()["options.how"].tolist() == ["double"]
    for how in ("centre", np.array(["centre"], object), b"centre"):
        np.testing.assert_allclose(
            servable.infer({"x": X, "options.how": how})["output"], expected("centre"), rtol=1e-6
        )
    np.testing.assert_array_equal(servable.infer({"x": X})["output"], expected("double"))


def test_calls_are_joined_where_their_own_program_keeps_rows_apart(servable):
    answers = {
        how: [servable.submit({"x": X[begin : begin + 2], "options.how": how}) for begin in (0, 2, 4)]
        for how in ("double", "centre")
    }
    np.testing.assert_array_equal(answers["double"][1].result()["output"], X[2:4] * 2)
    np.testing.assert_allclose(answers["centre"][1].result()["output"], X[2:4] - X[2:4].mean(axis=0), rtol=1e-6)
    assert answers["double"][0].batch_size > 2
    assert {answer.batch_size for answer in answers["centre"]} == {1}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("treble", "`options.how`: expected 'double' or 'centre', as at capture, got 'treble'"),
        (3, "`options.how`: expected a string, got 3"),
    ],
)
def test_string_that_was_not_captured_is_refused(how, text, servable):
    said = refusal(CallInvalid, servable.infer, {"x": X, "options.how": how})
    assert said.startswith(f"the call does not fit program `infer`:\n  - {text}")


def test_strings_are_bytes_of_the_protocol(servable):
    signature = Signature.of(servable.inputs, servable.outputs, servable.texts)
    assert signature.inputs["options.how"] == ("BYTES", (1,))
    inputs = {"x": X, "options.how": np.array(["größer"], object)}
    body, json_nbytes = write_call(inputs, signature)
    assert read_request(bytearray(body), json_nbytes, signature).inputs["options.how"].tolist() == ["größer"]
    entry = {"name": "options.how", "datatype": "BYTES", "shape": [1], "data": ["centre"]}
    asked = read_request(bytearray(json.dumps({"inputs": [entry]}).encode()), None, signature)
    assert asked.inputs["options.how"].tolist() == ["centre"]


WRONG = {
    "length": (b"\x05\0\0\0abc", "`options.how`: its data end within a string"),
    "half_a_length": (b"\x05\0", "`options.how`: its data end within a string"),
    "none": (b"", "`options.how`: BYTES[1] takes 1 strings, and there are 0"),
    "two": (b"\x01\0\0\0a\x01\0\0\0b", "`options.how`: BYTES[1] takes 1 strings, and there are more"),
    "no_text": (b"\x01\0\0\0\xff", "`options.how`: its data are no strings of UTF-8"),
}


@pytest.mark.parametrize(("data", "text"), WRONG.values(), ids=WRONG)
def test_bytes_that_are_no_strings_are_refused(data, text, bundle):
    servable = Servable(bundle)
    signature = Signature.of(servable.inputs, servable.outputs, servable.texts)
    entry = {
        "name": "options.how", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)},
    }  # fmt: skip
    head = json.dumps({"inputs": [entry]}).encode()
    assert refusal(Refusal, read_request, bytearray(head + data), len(head), signature) == text


@pytest.mark.parametrize("data", [[3], [None], [["a"]]])
def test_data_of_json_that_are_no_strings_are_refused(data, bundle):
    servable = Servable(bundle)
    signature = Signature.of(servable.inputs, servable.outputs, servable.texts)
    entry = {"name": "options.how", "datatype": "BYTES", "shape": [1], "data": data}
    with pytest.raises(Refusal, match=r"`options.how`: its data are no strings of UTF-8"):
        read_request(bytearray(json.dumps({"inputs": [entry]}).encode()), None, signature)
