"""What is refused, by which code and with which sentence; the server goes on."""

from __future__ import annotations

import json
import socket

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException


def tensor(**changes):
    return {"name": "input", "shape": [1, 8], "datatype": "FP32", "data": [0] * 8} | changes


def binary(nbytes, data, **changes):
    entry = {"name": "input", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": nbytes}} | changes
    head = json.dumps({"inputs": [entry]}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


JSON = {
    "no_json": (b"{", "the body is no inference request: Input data was truncated"),
    "no_inputs": ({}, "the body is no inference request: Object missing required field `inputs`"),
    "missing": ({"inputs": []}, "the call does not fit program `infer`: - `input`: missing"),
    "twice": ({"inputs": [tensor(), tensor()]}, "`input` is given twice"),
    "negative": ({"inputs": [tensor(shape=[-1, 8])]}, "`input`: no tensor has the shape [-1, 8]"),
    "ragged": ({"inputs": [tensor(data=[[0], [0, 1]])]}, "`input`: the lists of its data differ in length"),
    "beyond_the_range": (
        {"inputs": [tensor(shape=[65, 8], data=[0] * 520)]},
        "the call does not fit program `infer`: - `input`: size 0: `batch` is 65, outside [1:64]",
    ),
    "output": ({"inputs": [tensor()], "outputs": [{"name": "y"}]}, "`y`: no such output; there are `output`"),
    "timeout": (
        {"inputs": [tensor()], "parameters": {"timeout": -1}},
        "the body is no inference request: Expected `int` >= 1 - at `$.parameters.timeout`",
    ),
    "parameter": (
        {"inputs": [tensor()], "parameters": {"priority": 1}},
        "the body is no inference request: Object contains unknown field `priority` - at `$.parameters`",
    ),
    "field": (
        {"inputs": [tensor()], "output": []},
        "the body is no inference request: Object contains unknown field `output`",
    ),
    "data_twice": (
        {"inputs": [tensor(parameters={"binary_data_size": 0})]},
        "`input`: it has both `data` and `binary_data_size`",
    ),
}


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "http://127.0.0.1:1", "http://[::1", "null"])
@pytest.mark.parametrize("verb", ["load", "unload"])
def test_page_of_another_site_neither_loads_nor_unloads(origin, verb, server):
    path = f"/v2/repository/models/words/{verb}"
    found = server.ask(path, {}, {"Origin": origin}, method="POST")[:2]
    assert found == (403, {"error": f"pages of {origin} may not ask this server"})
    assert server.ask("/v2/models/words/ready")[0] == 200


def test_server_of_this_machine_has_no_name_that_others_give(server):
    # A name server may send a page's requests here, under the page's own name.
    names = {"rebound.example": 403, "rebound.example:8080": 403, "localhost": 200, "127.0.0.1:1": 200, "[::1]:80": 200}
    for name, status in names.items():
        found = server.ask("/v2/health/live", headers={"Host": name, "Origin": f"http://{name}"})
        assert found[0] == status
    error = "this server is not `rebound.example`, see `--allow-host`"
    assert server.ask("/v2/models", headers={"Host": "rebound.example"})[1] == {"error": error}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready", "/metrics"])
def test_health_is_asked_without_its_body(path, server):
    status, found, headers = server.ask(path, method="HEAD")
    assert (status, found) == (200, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(("body", "text"), JSON.values(), ids=JSON)
def test_wrong_json_is_refused_by_a_sentence(body, text, server):
    assert server.ask("/v2/models/digits/infer", body, method="POST")[:2] == (400, {"error": text})


BINARY = {
    "truncated": (32, bytes(31), {}, "`input`: `binary_data_size` is 32, and 31 bytes are left"),
    "too_long": (32, bytes(33), {}, "1 bytes of binary data belong to no input"),
    "other_shape": (16, bytes(16), {}, "`input`: FP32[1, 8] takes 32 bytes, and there are 16"),
    "no_size": (
        "a",
        bytes(32),
        {},
        "the body is no inference request: Expected `int | null`, got `str` - at "
        "`$.inputs[0].parameters.binary_data_size`",
    ),
}


@pytest.mark.parametrize(("nbytes", "data", "changes", "text"), BINARY.values(), ids=BINARY)
def test_wrong_binary_data_are_refused_by_a_sentence(nbytes, data, changes, text, server):
    body, headers = binary(nbytes, data, **changes)
    assert server.ask("/v2/models/digits/infer", body, headers)[:2] == (400, {"error": text})


@pytest.mark.parametrize("length", ["1000000", "-1", "x"])
def test_wrong_length_of_the_head_is_refused(length, server):
    body, _ = binary(32, bytes(32))
    status, found, _ = server.ask("/v2/models/digits/infer", body, {"Inference-Header-Content-Length": length})
    assert status == 400
    assert found["error"].startswith(("the header", "the body is no"))


KINDS = {
    "integers": ("count", "INT64", [0.5, 1], "`count`: its data are no numbers of INT64"),
    "flags": ("flags", "BOOL", [1, 0], "`flags`: its data are no numbers of BOOL"),
    "half": ("half", "FP16", [1, 2, 3], "`half`: FP16 has no form in JSON; send it as binary data"),
    "strings": ("how", "BYTES", [1], "`how`: its data are no strings of UTF-8"),
}


@pytest.mark.parametrize(("name", "datatype", "data", "text"), KINDS.values(), ids=KINDS)
def test_numbers_of_another_kind_are_refused(name, datatype, data, text, server):
    inputs = [{"name": name, "datatype": datatype, "shape": [len(data)], "data": data}]
    assert server.ask("/v2/models/kinds/infer", {"inputs": inputs})[:2] == (400, {"error": text})


def test_string_that_was_not_captured_is_refused_by_the_one_that_was(server):
    inputs = [{"name": "how", "datatype": "BYTES", "shape": [1], "data": ["down"]}]
    body = {"inputs": inputs, "outputs": [{"name": "count"}]}
    status, found, _ = server.ask("/v2/models/kinds/infer", body)
    assert status == 400
    assert found["error"].endswith("- `how`: expected 'up', as at capture, got 'down'")


def test_output_that_json_has_no_form_for_is_refused_before_it_is_computed(server):
    inputs = [{"name": f"batch.pair.{i}", "shape": [2, 3], "datatype": "FP32", "data": [1] * 6} for i in range(2)]
    assert server.ask("/v2/models/pair/infer", {"inputs": inputs})[:2] == (
        400,
        {"error": "`parts.1.0`: BF16 has no form in JSON; ask for it as binary data"},
    )


def test_value_that_the_model_refuses_is_the_clients_error(server):
    inputs = [{"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 10]}]
    assert server.ask("/v2/models/words/infer", {"inputs": inputs})[:2] == (
        400,
        {"error": "the model failed with IndexError: index out of range in self"},
    )


PATHS = {
    "model": ("GET", "/v2/models/none", 404, "there is no model `none`"),
    "model_infer": ("POST", "/v2/models/none/infer", 404, "there is no model `none`"),
    "version_infer": (
        "POST", "/v2/models/digits/versions/7/infer", 404, "model `digits` has no version `7` that is served; 1 is",
    ),
    "route": ("GET", "/v2/nothing", 404, "no route GET /v2/nothing"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "path", "status", "text"), PATHS.values(), ids=PATHS)
def test_unknown_names_are_refused_by_a_sentence(method, path, status, text, server):
    assert server.ask(path, method=method)[:2] == (status, {"error": text})


@pytest.mark.parametrize("told", [True, False])
def test_request_that_is_too_large_is_refused(told, server):
    body = bytes(200_000)
    headers = {} if told else {"Transfer-Encoding": "chunked"}
    found = server.ask("/v2/models/digits/infer", body if told else iter([body]), headers, method="POST")
    text = "the request is larger than 100000 bytes, see `--max-request-bytes`"
    assert found[:2] == (413, {"error": text})


GRPC = {
    "model": ("none", "input", (1, 8), "StatusCode.NOT_FOUND", "there is no model `none`"),
    "name": ("digits", "x", (1, 8), "StatusCode.INVALID_ARGUMENT", "`x`: no such input; there are `input`"),
    "shape": (
        "digits",
        "input",
        (1, 7),
        "StatusCode.INVALID_ARGUMENT",
        "`input`: expected the shape [-1, 8], got [1, 7]",
    ),
    "size": ("digits", "input", (65, 8), "StatusCode.INVALID_ARGUMENT", None),
}


@pytest.mark.parametrize(("model", "name", "shape", "code", "text"), GRPC.values(), ids=GRPC)
def test_grpc_refuses_by_the_codes_of_the_protocol(model, name, shape, code, text, server):
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        entry = triton_grpc.InferInput(name, shape, "FP32")
        entry.set_data_from_numpy(np.zeros(shape, np.float32))
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, [entry])
    assert caught.value.status() == code
    if text is not None:
        assert caught.value.message() == text


@pytest.mark.parametrize("where", ["request", "input", "output"])
def test_grpc_refuses_parameters_that_ask_for_what_is_not_done(where, server):
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        entry, output = triton_grpc.InferInput("input", (1, 8), "FP32"), triton_grpc.InferRequestedOutput("output")
        entry.set_data_from_numpy(np.zeros((1, 8), np.float32))
        if where == "input":
            entry.set_shared_memory("region", 32)
        if where == "output":
            output = triton_grpc.InferRequestedOutput("output", class_count=3)
        with pytest.raises(
            InferenceServerException,
            match=r"the parameters of a request, input or output: Object contains unknown field `",
        ) as caught:
            client.infer("digits", [entry], outputs=[output], priority=int(where == "request"))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady", "ModelMetadata", "RepositoryModelLoad", "ServerLive"])
def test_bytes_that_are_no_message_are_refused_by_a_sentence(method, server):
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the bytes are no message of the method"


def test_rubbish_at_either_port_leaves_the_server_serving(server):
    for address in (server.http, server.grpc):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(bytes(range(256)) * 10)
    body = {"inputs": [tensor()]}
    assert server.ask("/v2/models/digits/infer", body)[0] == 200
    assert not server.lines("worker has ended")
