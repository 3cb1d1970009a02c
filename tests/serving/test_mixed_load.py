"""Load of every kind for long: both protocols, wrong requests, broken connections, adapters, swaps; memory stays."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import aotexport_runtime
from aotexport_runtime import adapters
from tests.serving.server import PATIENCE_S, serving
from tests.serving.test_soak import resident_nbytes
from tests.serving.test_swaps import save_version
from tests.unit.serving.conftest import digits_model

pytestmark = pytest.mark.slow
MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
CLIENTS, PAUSE_S, SWAP_S, SAMPLES = 6, 0.02, 20, 60
MOST_GROWTH_NBYTES = 8 << 20


def tensor(module, name, array, datatype):
    found = module.InferInput(name, array.shape, datatype)
    found.set_data_from_numpy(array)
    return found


class Client:
    """Asks in turn for everything that a server answers or refuses, and checks each answer."""

    def __init__(self, server, seed):
        self.server = server
        self.count = 0
        self._numbers = np.random.default_rng(seed)
        self._eager = digits_model()
        self._clients = {triton_http: triton_http.InferenceServerClient(server.http, network_timeout=PATIENCE_S)}
        self._clients[triton_grpc] = triton_grpc.InferenceServerClient(server.grpc)

    def run(self, ended):
        requests = (
            lambda: self._digits(triton_http),
            lambda: self._digits(triton_grpc),
            self._json,
            lambda: self._words(triton_grpc),
            lambda: self._kinds(triton_http),
            self._wrong,
            self._broken,
            self._tell,
        )
        for request in itertools.cycle(requests):
            if ended.wait(PAUSE_S):
                break
            request()
            self.count += 1
        for client in self._clients.values():
            client.close()

    def _expect(self, values, version, x):
        with torch.no_grad():
            expected = self._eager(torch.from_numpy(x)).numpy() + int(version) - 1
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)

    def _rows(self):
        return self._numbers.standard_normal((1 + self.count % 5, 8), np.float32)

    def _digits(self, module):
        x = self._rows()
        answer = self._clients[module].infer("digits", [tensor(module, "input", x, "FP32")])
        found = answer.get_response()
        version = found["model_version"] if isinstance(found, dict) else found.model_version
        self._expect(answer.as_numpy("output"), version, x)

    def _json(self):
        x = self._rows()
        entry = {"name": "input", "shape": [*x.shape], "datatype": "FP32", "data": x.ravel().tolist()}
        status, found, _ = self.server.ask("/v2/models/digits/infer", {"inputs": [entry]})
        assert status == 200, found
        self._expect(np.reshape(found["outputs"][0]["data"], (-1, 3)), found["model_version"], x)
        asked = {"inputs": [entry], "parameters": {"adapter": "german"}}
        status, found, _ = self.server.ask("/v2/models/tuned/infer", asked)
        assert status == 200, found

    def _words(self, module):
        ids = self._numbers.integers(0, 10, (1 + self.count % 3, 2 + self.count % 31))
        answer = self._clients[module].infer("words", [tensor(module, "ids", ids, "INT64")])
        assert answer.as_numpy("output").shape == (len(ids), 4)

    def _kinds(self, module):
        arrays = {
            "flags": (np.array([True, False]), "BOOL"),
            "half": (np.ones(3, np.float16), "FP16"),
            "brain": (np.ones(3, ml_dtypes.bfloat16), "BF16"),
            "count": (np.array([1, self.count]), "INT64"),
        }
        asked = [tensor(module, name, *value) for name, value in arrays.items()]
        assert self._clients[module].infer("kinds", asked).as_numpy("count")[1] == self.count + 1

    def _wrong(self):
        for path, body, status in (
            ("digits", b"{", 400),
            ("digits", {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}, 400),
            ("digits", b"x" * 100_001, 413),
            (f"none-{self.count}", {"inputs": []}, 404),
        ):
            assert self.server.ask(f"/v2/models/{path}/infer", body)[0] == status

    def _broken(self):
        for address, begin in (
            (self.server.http, b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"),
            (self.server.grpc, bytes(range(256))),
        ):
            host, port = address.split(":")
            with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
                connection.sendall(begin)

    def _tell(self):
        for path in ("/metrics", "/v2/models/digits", "/v2/health/ready", "/ui"):
            assert self.server.ask(path)[0] == 200
        assert len(self.server.ask("/v2/repository/index", {})[1]) == 4


def add_adapter(bundle, place):
    module = aotexport_runtime.load(bundle).eval()
    adapters.add_lora(module, r=2)
    adapters.save_adapter(module, place)


def test_memory_stays_under_load_of_every_kind(exported, tmp_path):
    root = tmp_path / "models"
    for name in ("digits", "words", "kinds"):
        shutil.copytree(exported(name), root / name / "1")
    shutil.copytree(exported("digits"), root / "tuned/1")
    add_adapter(root / "tuned/1", root / "tuned/1.adapters/german")
    options = ("--workers", "2", "--access-log", "off", "--max-request-bytes", "100000")
    ended, samples = threading.Event(), []
    with serving(root, *options) as server, ThreadPoolExecutor(CLIENTS + 1) as pool:
        server.wait_until_ready()
        clients = [Client(server, seed) for seed in range(CLIENTS)]
        running = [pool.submit(client.run, ended) for client in clients]
        running.append(pool.submit(swap_again_and_again, exported("digits"), root / "digits", server, ended))
        workers = server.workers()
        try:
            for _ in range(SAMPLES):
                ended.wait(MINUTES * 60 / SAMPLES)
                assert not any(each.done() for each in running), [each.exception() for each in running if each.done()]
                samples.append([resident_nbytes(worker) for worker in workers])
                print(sum(each.count for each in clients), *(nbytes >> 10 for nbytes in samples[-1]), flush=True)
        finally:
            ended.set()
        for each in running:
            each.result()
        assert server.workers() == workers
    for nbytes in zip(*samples, strict=True):
        assert max(nbytes[SAMPLES // 2 :]) - max(nbytes[: SAMPLES // 2]) < MOST_GROWTH_NBYTES


def swap_again_and_again(bundle, model: Path, server, ended):
    for version in itertools.count(2):
        if ended.wait(SWAP_S):
            return
        save_version(bundle, model / str(version), version - 1)
        # By both workers; the client's thread that waits for the log ends with the test.
        server.wait_for_log("model is served", times=2, model="digits", version=str(version))
        if version > 3:
            shutil.rmtree(model / str(version - 2))
