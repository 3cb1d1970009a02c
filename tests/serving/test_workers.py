"""The life of processes: replaced when they die or are stuck, drained at the end, and what they tell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import aotexport
from tests.serving.server import PATIENCE_S, ROOT, Server, serving, wait_for

WORDS = {"inputs": [{"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}]}
BODY = {"id": "mine", "inputs": [{"name": "input", "shape": [1, 8], "datatype": "FP32", "data": [0] * 8}]}


def answers(server):
    """Ask in a new connection, as clients do again whose connection has failed."""
    return wait_for(lambda: server.ask("/v2/models/digits/infer", BODY), server)


def test_killed_worker_is_replaced_and_clients_that_ask_again_are_answered(repository):
    with serving(repository, "--workers", "2") as server:
        server.wait_until_ready()
        expected = answers(server)[1]["outputs"][0]["data"]
        ended = threading.Event()

        def load(_):
            count = 0
            while not ended.is_set():
                status, found, _ = answers(server)
                assert status == 200
                # Other batches have other last bits.
                np.testing.assert_allclose(found["outputs"][0]["data"], expected, rtol=1e-5, atol=1e-6)
                count += 1
            return count

        # Both have loaded: a log that counts what each loads says when the next one has.
        server.wait_for_log("model is served", model="words", times=2)
        with ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(load, number) for number in range(4)]
            try:
                for killed in range(1, 3):
                    os.kill(server.workers()[0], signal.SIGKILL)
                    server.wait_for_log("worker has ended", times=killed, reason="died")
                    server.wait_for_log("worker starts", times=2 + killed)
                    server.wait_for_log("model is served", model="words", times=2 + killed)
            finally:
                ended.set()
            assert all(each.result() > 0 for each in loads)
        # As a worker leaves it that is killed before it has written.
        metrics = re.search(r"/\S+/metrics/", Path(f"/proc/{server.workers()[0]}/maps").read_text())[0]
        Path(metrics, "counter_1.db").touch()
        assert 'aotexport_workers_ended_total{reason="died"} 2.0' in server.ask("/metrics")[1].decode()


def test_stuck_worker_is_ended_and_replaced(repository):
    with serving(repository, "--request-timeout-s", "1") as server:
        server.wait_until_ready()
        stopped = server.workers()[0]
        os.kill(stopped, signal.SIGSTOP)
        server.wait_for_log("worker has ended", reason="stuck", worker=stopped)
        assert answers(server)[0] == 200


class Endless(torch.nn.Module):
    """Computes for as many steps as it is told."""

    def forward(self, x, steps):
        return while_loop(lambda i, x: i < steps, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))[1]


@pytest.mark.parametrize("swapped", [False, True])
def test_worker_whose_model_computes_for_too_long_is_ended_and_replaced(swapped, tmp_path):
    args, bundle, served = (torch.ones(2), torch.tensor(3)), tmp_path / "bundle", tmp_path / "models/endless"
    aotexport.export(Endless(), args, output=bundle, programs=("infer",), verify=False)
    shutil.copytree(bundle, served / "1")
    options = ("--request-timeout-s", "2", "--limits", f"iterations={10**12}")
    with serving(served.parent, *options) as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready()
        (stuck,) = server.workers()
        before = cpu_s(stuck)
        asked = pool.submit(server.ask, "/v2/models/endless/infer", steps(10**12))
        wait_for(lambda: cpu_s(stuck) > before + 0.5, server)
        if swapped:
            shutil.copytree(bundle, served / "2")
            server.wait_for_log("model is served", version="2")
        assert asked.result()[:2] == (504, {"error": "the request was not answered within 2000 ms"})
        server.wait_for_log("worker has ended", reason="stuck", worker=stuck)
        status, found, _ = wait_for(lambda: server.ask("/v2/models/endless/infer", steps(3)), server)
        assert (status, found["model_version"]) == (200, "2" if swapped else "1")
        expected = Endless()(*args).tolist()
        assert found["outputs"][0]["data"] == pytest.approx(expected)


def cpu_s(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps(count):
    x = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 1]}
    return {"inputs": [x, {"name": "steps", "shape": [], "datatype": "INT64", "data": [count]}]}


def test_request_that_comes_too_slowly_is_refused_and_its_connection_closed(repository):
    with serving(repository, "--request-timeout-s", "0.2") as server:
        server.wait_until_ready()
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall(
                b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
            )
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the request took longer than 0.2 s to come, see `--request-timeout-s`" in answer


def test_end_answers_what_was_asked(repository):
    # The call waits for others for as long as the server takes to be told to end.
    with serving(repository, "--max-latency-ms", "2500", "--workers", "2") as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, "/v2/models/digits/infer", BODY)
            wait_for(
                lambda: 'aotexport_waiting_requests{model="digits"} 1.0' in server.ask("/metrics")[1].decode(), server
            )
            assert server.end() == 0
            assert asked.result()[0] == 200
        assert len(server.lines("worker has drained")) == 2


def test_each_request_is_one_line_of_the_log_and_counted(server):
    assert server.ask("/v2/models/digits/infer", BODY | {"id": "seen"})[0] == 200
    line = server.wait_for_log("request", id="seen")
    assert {key: line[key] for key in ("model", "version", "protocol", "outcome", "batch")} == {
        "model": "digits", "version": "1", "protocol": "http", "outcome": "ok", "batch": 1,
    }  # fmt: skip
    assert line["ms"] >= line["compute_ms"] > 0
    wrong = {"id": "wrong", "inputs": []}
    assert server.ask("/v2/models/digits/infer", wrong)[0] == 400
    assert server.wait_for_log("request", id="wrong")["error"].endswith("`input`: missing")
    text = server.ask("/metrics")[1].decode()
    assert 'aotexport_requests_total{model="digits",outcome="ok",protocol="http",version="1"}' in text
    assert 'aotexport_requests_total{model="digits",outcome="invalid",protocol="http",version="1"}' in text
    assert 'aotexport_model_workers{model="digits",version="1"} 1.0' in text
    assert "aotexport_worker_memory_bytes{pid=" in text


def test_requests_wait_for_a_worker_that_still_loads(repository):
    with serving(repository, "--workers", "3") as server:
        # As soon as one worker has loaded all; connections reach the others too.
        server.wait_until_ready()
        asked = [server.ask(f"/v2/models/{name}") for name in ("words", "kinds", "digits") * 10]
        assert {(status, found["versions"][0]) for status, found, _ in asked} == {(200, "1")}
        assert {answers(server)[0] for _ in range(10)} == {200}


def test_two_workers_load_and_unload_together(repository):
    with serving(repository, "--workers", "2") as server:
        server.wait_until_ready()
        server.wait_for_log("model is served", model="words", times=2)
        for change, status in (("unload", 503), ("load", 200)):
            assert server.ask(f"/v2/repository/models/words/{change}", method="POST")[0] == 200
            # Connections reach both.
            assert {server.ask("/v2/models/words/infer", WORDS)[0] for _ in range(20)} == {status}


def test_workers_end_when_their_parent_is_killed(repository):
    server = Server(repository)
    server.wait_until_ready()
    (worker,) = server.workers()
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not Path(f"/proc/{worker}").exists())
    server.process.stderr.close()


USAGE = {
    "port": (["--http-port", "-1"], "`--http-port`: expected at least 0, got -1"),
    "threads": (["--threads", "0"], "`--threads`: expected at least 1, got 0"),
    "limit": (["--limits", "nodes=0"], "`--limits`: `nodes` is a number above 0, got `0`"),
    "tls": (["--tls-cert", "a"], "`--tls-cert` and `--tls-key` belong together"),
}


@pytest.mark.parametrize(("options", "text"), USAGE.values(), ids=USAGE)
def test_wrong_options_are_refused_by_a_sentence(options, text, repository):
    assert failed(repository, *options) == (2, f"error: {text}\n")


def failed(*arguments):
    command = [sys.executable, "-m", "aotexport_runtime", "serve", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "runtimes/python")
    return done.returncode, done.stderr


def test_tls_encrypts_http_and_grpc(repository, tmp_path):
    import ssl
    import urllib.request

    import tritonclient.grpc as triton_grpc

    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    with serving(repository, "--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem") as server:
        server.wait_for_log("model is served", model="words")
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with urllib.request.urlopen(f"https://{server.http}/v2/health/live", context=context) as response:
            assert response.status == 200
        client = triton_grpc.InferenceServerClient(server.grpc, ssl=True, root_certificates=str(tmp_path / "cert.pem"))
        with client:
            entry = triton_grpc.InferInput("input", (1, 8), "FP32")
            entry.set_data_from_numpy(np.zeros((1, 8), np.float32))
            assert client.infer("digits", [entry]).as_numpy("output").shape == (1, 3)
