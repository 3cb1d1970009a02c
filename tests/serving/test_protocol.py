"""The protocol by its own clients: metadata, tensors of every kind, identity, versions, load and unload."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.serving.server import wait_for
from tests.unit.serving.conftest import Pair, digits_model

CLIENTS = {"http": triton_http, "grpc": triton_grpc}


@pytest.fixture(params=CLIENTS)
def client(request, server):
    """Return a client of Triton's, with its module."""
    module = CLIENTS[request.param]
    client = module.InferenceServerClient(getattr(server, request.param))
    client.module = module
    yield client
    client.close()


def ask(client, model, arrays, datatypes=None, **options):
    inputs = []
    for name, array in arrays.items():
        datatype = (datatypes or {}).get(name) or {"f": "FP", "i": "INT"}[array.dtype.kind] + str(array.itemsize * 8)
        inputs.append(client.module.InferInput(name, array.shape, datatype))
        inputs[-1].set_data_from_numpy(array)
    return client.infer(model, inputs, **options)


def eager(x):
    with torch.no_grad():
        return digits_model()(torch.from_numpy(x)).numpy()


def test_metadata_is_exact(server):
    status, found, _ = server.ask("/v2/models/digits")
    assert (status, found) == (
        200,
        {
            "name": "digits",
            "versions": ["1"],
            "platform": "aotexport",
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 8]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
        },
    )
    assert server.ask("/v2/models/digits/versions/1")[1] == found
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        message = client.get_model_metadata("digits", as_json=True)
    assert message["inputs"] == [{"name": "input", "datatype": "FP32", "shape": ["-1", "8"]}]
    assert message["versions"] == ["1"]


def test_page_and_log_say_whether_requests_are_joined(server):
    digits = server.ask("/ui/models/digits/about")[1]
    assert digits.pop("axes")["name"] == "batch"
    assert digits == {"not_joined": "", "classes": ["low", "<b>mid</b>", "high"]}
    reason = "no dynamic size stands once in every input and output, and nowhere else"
    assert server.ask("/ui/models/pair/about")[1] == {"axes": None, "not_joined": reason, "classes": []}
    (line,) = server.lines("model is served", model="digits", joined_along="batch")
    assert line["engine"] in ("portable", "packed", "autograd")
    assert server.lines("model is served", model="pair", joined_along=None, not_joined=reason)


def test_binary_inference_equals_eager_and_keeps_the_id(client):
    x = np.random.default_rng(0).random((5, 8), np.float32)
    answer = ask(client, "digits", {"input": x}, request_id="mine")
    np.testing.assert_allclose(answer.as_numpy("output"), eager(x), rtol=1e-5, atol=1e-6)
    response = answer.get_response()
    found = response if isinstance(response, dict) else {"id": response.id, "model_version": response.model_version}
    assert (found["id"], found["model_version"]) == ("mine", "1")


def test_json_inference_equals_eager(server):
    x = np.random.default_rng(1).random((2, 8), np.float32)
    inputs = [{"name": "input", "shape": [2, 8], "datatype": "FP32", "data": x.tolist()}]
    asked = time.perf_counter()
    headers = {"x-request-id": "a", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    status, found, head = server.ask("/v2/models/digits/versions/1/infer", {"inputs": inputs}, headers)
    took_ms = (time.perf_counter() - asked) * 1e3
    assert (status, found["id"], found["outputs"][0]["shape"]) == (200, "a", [2, 3])
    np.testing.assert_allclose(np.reshape(found["outputs"][0]["data"], (2, 3)), eager(x), rtol=1e-5, atol=1e-6)
    waited_ms, computed_ms = map(float, re.findall("dur=([0-9.]+)", head["server-timing"]))
    assert waited_ms >= 0 < computed_ms
    assert waited_ms + computed_ms < took_ms
    server.wait_for_log("request", id="a", trace_id="ab" * 16)


def test_every_kind_of_tensor_goes_in_and_out(client):
    arrays = {
        "flags": np.array([True, False]),
        "half": np.array([0.5, -2, 3], np.float16),
        "brain": np.array([0.5, -2, 3], ml_dtypes.bfloat16),
        "count": np.array([-(2**62), 2**62]),
        "how": np.array(["up"], object),
    }
    datatypes = {"flags": "BOOL", "half": "FP16", "brain": "BF16", "count": "INT64", "how": "BYTES"}
    answer = ask(client, "kinds", arrays, datatypes)
    np.testing.assert_array_equal(answer.as_numpy("flags"), ~arrays["flags"])
    np.testing.assert_array_equal(answer.as_numpy("half"), arrays["half"] * 2)
    np.testing.assert_array_equal(answer.as_numpy("brain"), arrays["brain"] * 2)
    np.testing.assert_array_equal(answer.as_numpy("count"), arrays["count"] + 1)


def test_only_the_outputs_that_are_asked_for_are_answered(client):
    a, b = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
    wanted = [client.module.InferRequestedOutput("sum")]
    answer = ask(client, "pair", {"batch.pair.0": a, "batch.pair.1": b}, outputs=wanted)
    expected = Pair()({"pair": (torch.from_numpy(a), torch.from_numpy(b))}, 3)["sum"]
    np.testing.assert_array_equal(answer.as_numpy("sum"), expected.numpy())
    assert answer.as_numpy("parts.0") is None


def test_kserves_own_client_is_answered(server):
    # In a process of its own: KServe reads the command line when it is imported.
    script = """
import asyncio, json, sys
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
async def main(url):
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    tensor = InferInput("input", [1, 8], "FP32", data=[float(i) for i in range(8)])
    request = InferRequest(model_name="digits", infer_inputs=[tensor], request_id="k")
    answer = await client.infer(url, request, model_name="digits")
    ready = await client.is_server_ready(url), await client.is_model_ready(url, "digits")
    print(json.dumps([answer.id, answer.outputs[0].as_numpy().tolist(), ready]))
url = sys.argv.pop()
asyncio.run(main(url))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, f"http://{server.http}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    name, values, ready = json.loads(done.stdout.splitlines()[-1])
    assert (name, ready) == ("k", [True, True])
    np.testing.assert_allclose(values, eager(np.arange(8, dtype=np.float32)[None]), rtol=1e-5, atol=1e-5)


def test_model_is_unloaded_and_loaded_by_clients(client, server):
    client.unload_model("words")
    assert not client.is_model_ready("words")
    assert server.ask("/v2/health/ready")[0] == 200
    with pytest.raises(Exception, match="model `words` is unloaded; load it first"):
        ask(client, "words", {"ids": np.zeros((1, 3), np.int64)})
    (entry,) = [entry for entry in server.ask("/v2/repository/index", {})[1] if entry["name"] == "words"]
    assert entry == {"name": "words", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    ready = server.ask("/v2/repository/index", {"ready": True})[1]
    assert [entry["name"] for entry in ready] == ["digits", "kinds", "pair"]
    client.load_model("words")
    assert ask(client, "words", {"ids": np.zeros((1, 3), np.int64)}).as_numpy("output").shape == (1, 4)


def test_calls_of_many_clients_are_joined_and_each_has_its_own_answer(server):
    from tritonclient.http.aio import InferenceServerClient

    async def main():
        async with InferenceServerClient(server.http) as client:

            async def one(seed):
                x = np.random.default_rng(seed).random((1 + seed % 3, 8), np.float32)
                tensor = triton_http.InferInput("input", x.shape, "FP32")
                tensor.set_data_from_numpy(x)
                answer = await client.infer("digits", [tensor])
                np.testing.assert_allclose(answer.as_numpy("output"), eager(x), rtol=1e-5, atol=1e-6)

            await asyncio.gather(*map(one, range(200)))

    asyncio.run(main())
    text = server.ask("/metrics")[1].decode()
    labels = 'model="digits",version="1"'
    alone, batches = (
        next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"aotexport_batch_size_{name}"))
        for name in (f'bucket{{le="1.0",{labels}}}', f"count{{{labels}}}")
    )
    assert alone < batches


def test_config_and_statistics_are_triton_s(server):
    with triton_http.InferenceServerClient(server.http) as client:
        config = client.get_model_config("digits", "1")
        assert (config["name"], config["max_batch_size"]) == ("digits", 32)
        assert config["input"] == [{"name": "input", "data_type": "TYPE_FP32", "dims": [8]}]
        assert client.get_model_config("words")["output"][0]["dims"] == [4]
        before, rows = client.get_inference_statistics("digits")["model_stats"][0], 5
        ask_digits = [triton_http.InferInput("input", (rows, 8), "FP32").set_data_from_numpy(np.ones((rows, 8), "f"))]
        client.infer("digits", ask_digits)
        with pytest.raises(Exception, match="expected the shape"):
            client.infer("digits", [triton_http.InferInput("input", (8,), "FP32").set_data_from_numpy(np.ones(8, "f"))])
        (after,) = wait_for(
            lambda: (seen := client.get_inference_statistics("digits")["model_stats"]) != [before] and seen
        )
        grown = {name: after[name] - before[name] for name in ("inference_count", "execution_count")}
        assert grown == {"inference_count": rows, "execution_count": 1}
        for kind in ("success", "fail", "queue", "compute_infer"):
            assert after["inference_stats"][kind]["count"] - before["inference_stats"][kind]["count"] == 1
        assert 0 < after["inference_stats"]["compute_infer"]["ns"] < after["inference_stats"]["success"]["ns"]
        every = client.get_inference_statistics()["model_stats"]
        assert [each["name"] for each in every] == ["digits", "kinds", "pair", "words"]
        with pytest.raises(Exception, match="there is no model `none`"):
            client.get_inference_statistics("none")
