"""Load for long: many clients while versions are swapped and workers killed, and what the memory does meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import urllib3

import aotexport
from tests.models import module
from tests.serving.server import PATIENCE_S, serving, wait_for
from tests.serving.test_swaps import save_version
from tests.unit.serving.conftest import digits_model

pytestmark = pytest.mark.slow
CLIENTS, REQUESTS, SWAPS, KILLS = 64, int(os.environ.get("SOAK_REQUESTS", "10000")), 20, 3


class Clients:
    """Clients that ask without pause and check every answer; they ask again when their connection fails."""

    def __init__(self, server):
        self.server = server
        self.answered = [0] * CLIENTS
        self.versions = set()
        self.ended = threading.Event()
        self._eager = digits_model()
        retries = urllib3.Retry(total=30, backoff_factor=0.05, backoff_max=1, allowed_methods=None)
        self._http = urllib3.PoolManager(maxsize=CLIENTS, retries=retries, timeout=PATIENCE_S)

    def run(self, number):
        numbers = np.random.default_rng(number)
        for count in itertools.count():
            if self.ended.is_set():
                return
            x = numbers.standard_normal((1 + count % 4, 8), np.float32)
            version, values = self._ask(f"{number}-{count}", x)
            with torch.no_grad():
                # A version adds its number to the first one's answers, so that no answer fits two versions.
                expected = self._eager(torch.from_numpy(x)).numpy() + int(version) - 1
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
            self.versions.add(version)
            self.answered[number] += 1

    def _ask(self, name, x):
        head = {"name": "input", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
        head = json.dumps({"id": name, "inputs": [head], "parameters": {"binary_data_output": True}}).encode()
        url = f"http://{self.server.http}/v2/models/digits/infer"
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = self._http.request("POST", url, body=head + x.tobytes(), headers=headers)
        assert answer.status == 200, answer.data
        end = int(answer.headers["Inference-Header-Content-Length"])
        found = json.loads(answer.data[:end])
        assert found["id"] == name
        return found["model_version"], np.frombuffer(answer.data[end:], np.float32).reshape(
            found["outputs"][0]["shape"]
        )


def test_no_answer_is_lost_or_mixed_while_versions_are_swapped_and_workers_killed(exported, tmp_path):
    model = tmp_path / "models/digits"
    shutil.copytree(exported("digits"), model / "1")
    options = ("--workers", "2", "--access-log", "off")
    with serving(model.parent, *options) as server, ThreadPoolExecutor(CLIENTS) as pool:
        server.wait_until_ready()
        clients = Clients(server)
        running = [pool.submit(clients.run, number) for number in range(CLIENTS)]
        try:
            for version in range(2, SWAPS + 2):
                save_version(exported("digits"), model / str(version), version - 1)
                server.wait_for_log("model is served", version=str(version))
                if version % (SWAPS // KILLS) == 0:
                    os.kill(server.workers()[0], signal.SIGKILL)
                wait_for(lambda version=str(version): version in clients.versions, server)
            wait_for(lambda: sum(clients.answered) >= REQUESTS or any(each.done() for each in running), server)
        finally:
            clients.ended.set()
        for each in running:
            each.result()
        assert min(clients.answered) > 0
        assert clients.versions == {str(version) for version in range(1, SWAPS + 2)}
        assert len(server.lines("worker has ended", reason="died")) == KILLS
        print(f"{sum(clients.answered)} answers, {len(clients.versions) - 1} swaps, {KILLS} workers killed")


def wide():
    """A model of 16 MiB."""
    return module(lambda self, x: self.linear(x).mean(dim=1), linear=torch.nn.Linear(1024, 4096))


def resident_nbytes(worker):
    return int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_swapped_versions_is_freed(tmp_path):
    torch.manual_seed(0)
    bundle, served = tmp_path / "bundle", tmp_path / "models/wide"
    aotexport.export(wide().eval(), (torch.ones(1, 1024),), output=bundle, programs=("infer",), verify=False)
    shutil.copytree(bundle, served / "1")
    with serving(served.parent) as server, triton_grpc.InferenceServerClient(server.grpc) as client:
        server.wait_until_ready()
        (worker,) = server.workers()
        seen = []
        for version in range(2, 52):
            shutil.copytree(bundle, tmp_path / "next")
            (tmp_path / "next").rename(served / str(version))
            shutil.rmtree(served / str(version - 1))
            server.wait_for_log("model is served", version=str(version))
            tensor = triton_grpc.InferInput("x", (1, 1024), "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1024), np.float32))
            client.infer("wide", [tensor])
            seen.append(resident_nbytes(worker))
        print([each >> 20 for each in seen])
        assert max(seen[10:]) - max(seen[:10]) < 2 * 16 << 20
