"""Requests that wait: refused beyond the queue, answered at their deadline, cancelled with their client, drained."""

from __future__ import annotations

import http.client
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.serving.server import serving, wait_for
from tests.serving.test_workers import BODY

INFER = "/v2/models/digits/infer"


@pytest.fixture(scope="module")
def held(repository):
    """Return a server whose calls wait for others until the batch is full, which its queue does not allow."""
    options = ("--max-waiting", "2", "--max-latency-ms", "600000", "--drain-s", "2")
    with serving(repository, *options) as server:
        yield server.wait_until_ready()


@pytest.fixture
def client(held):
    """Return a client of gRPC, and the input of a call."""
    with triton_grpc.InferenceServerClient(held.grpc) as client:
        tensor = triton_grpc.InferInput("input", (1, 8), "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 8), np.float32))
        yield client, [tensor]


def wait_until_waiting(server, count):
    line = f'aotexport_waiting_requests{{model="digits"}} {count:.1f}'
    wait_for(lambda: line in server.ask("/metrics")[1].decode(), server)


@pytest.mark.parametrize("wait_ms", [1, 300])
def test_request_is_answered_at_its_deadline(held, wait_ms):
    began = time.monotonic()
    status, found, _ = held.ask(INFER, BODY | {"parameters": {"timeout": wait_ms * 1000}})
    assert (status, found["error"]) == (504, f"the request was not answered within {wait_ms} ms")
    assert time.monotonic() - began < 30  # and not when the batch is full
    wait_until_waiting(held, 0)


def test_request_whose_client_goes_away_is_cancelled(held):
    connection = http.client.HTTPConnection(held.http)
    connection.request("POST", INFER, json.dumps(BODY | {"id": "gone"}))
    wait_until_waiting(held, 1)
    connection.close()
    line = held.wait_for_log("request", id="gone")
    assert (line["outcome"], "error" in line) == ("cancelled", False)
    wait_until_waiting(held, 0)
    assert 'outcome="cancelled"' in held.ask("/metrics")[1].decode()


def test_request_whose_client_goes_away_while_it_sends_is_cancelled(held):
    connection = http.client.HTTPConnection(held.http)
    connection.putrequest("POST", INFER)
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b"{")
    connection.close()
    error = "the client went away before its request was whole"
    assert held.wait_for_log("request", error=error)["outcome"] == "cancelled"


def test_full_queue_refuses_and_what_drains_for_too_long_is_refused(held, client):
    caller, inputs = client
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(held.ask, INFER, BODY) for _ in range(2)]
        wait_until_waiting(held, 2)
        status, found, headers = held.ask(INFER, BODY)
        text = "2 requests wait for model `digits` already, see `--max-waiting`; try again later"
        assert (status, found["error"], headers["retry-after"]) == (429, text, "1")
        assert held.ask("/v2/health/ready")[0] == 200
        held.process.send_signal(signal.SIGTERM)
        ending = "the server is ending; ask another"
        status, found, headers = wait_for(lambda: (answer := held.ask("/v2/health/ready"))[0] == 503 and answer, held)
        assert (found["error"], headers["retry-after"]) == (ending, "1")
        assert held.ask("/v2/health/live")[0] == 200
        assert held.ask(INFER, BODY)[:2] == (503, {"error": ending})
        with pytest.raises(InferenceServerException) as caught:
            caller.infer("digits", inputs)
        assert (caught.value.status(), caught.value.message()) == ("StatusCode.UNAVAILABLE", ending)
        assert held.process.wait(60) == 0
        assert [each.result()[:2] for each in asked] == [(503, {"error": ending})] * 2
        with pytest.raises(OSError, match="refused"):
            held.ask("/v2/health/live")
