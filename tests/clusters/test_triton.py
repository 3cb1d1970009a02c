"""The example of Triton, by a real Triton server.

The wheel `nvidia-pytriton` holds one, with its Python backend (55 MB, no GPU needed). It wants numpy below 2, the
system's Python and its shared library (Debian: `libpython3.11`), so that these tests have an environment of their own:

    /usr/bin/python3 -m venv .venv-triton
    .venv-triton/bin/python -m pip install nvidia-pytriton 'numpy<2' runtimes/python -e '.[dev]'
    .venv-triton/bin/python -m pytest tests/clusters/test_triton.py
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import aotexport

EXAMPLE = Path(__file__).parents[2] / "examples/serving/triton"
PORTS = {"http": 18200, "grpc": 18201, "metrics": 18202}
found = importlib.util.find_spec("pytriton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found is None, reason="needs `pip install nvidia-pytriton`, which holds a Triton server"),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


@pytest.fixture(scope="module")
def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)).eval()


@pytest.fixture(scope="module")
def repository(model, words, tmp_path_factory):
    """Lay out a repository as `examples/serving/triton/README.md` says."""
    root = tmp_path_factory.mktemp("repository")
    batch = torch.export.Dim("batch", min=1, max=64)
    for name, module, example in (("digits", model, torch.ones(5, 8)), ("words", words, torch.ones(5, 2).long())):
        version = root / name / "1"
        aotexport.export(
            module,
            (example,),
            output=version / "bundle",
            dynamic_shapes=({0: batch},),
            programs=("infer",),
            verify=False,
        )
        command = [sys.executable, "-m", "aotexport_runtime", "triton-config", version / "bundle", "--name", name]
        config = subprocess.run(command, capture_output=True, check=True)
        (version.parent / "config.pbtxt").write_bytes(config.stdout)
        shutil.copy(EXAMPLE / "model.py", version)
    return root


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory):
    """Start Triton, and wait until it is ready."""
    home = Path(found.origin).parent
    backend = tmp_path_factory.mktemp("backends") / "python"
    shutil.copytree(home / "tritonserver/backends/python", backend)
    shutil.copytree(home / f"tritonserver/python_backend_stubs/3.{sys.version_info.minor}", backend, dirs_exist_ok=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(home.parent / "nvidia_pytriton.libs"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    options = [f"--{name}-port={port}" for name, port in PORTS.items()]
    process = subprocess.Popen(
        [
            home / "tritonserver/bin/tritonserver",
            f"--model-repository={repository}",
            f"--backend-directory={backend.parent}",
            "--http-address=127.0.0.1",
            *options,
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    for _ in range(300):
        if process.poll() is not None:
            pytest.fail(process.stderr.read().decode(errors="replace")[-3000:])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORTS['http']}/v2/health/ready")
            break
        except OSError:
            time.sleep(0.2)
    yield
    process.terminate()
    process.communicate()


def post(rows, model="digits", kind="FP32"):
    """Return the status and the body of an answer."""
    data = torch.tensor(rows)
    tensor = {"name": "input", "datatype": kind, "shape": list(data.shape), "data": data.ravel().tolist()}
    url = f"http://127.0.0.1:{PORTS['http']}/v2/models/{model}/infer"
    try:
        with urllib.request.urlopen(url, json.dumps({"inputs": [tensor]}).encode()) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_triton_answers_as_eager_to_clients_at_once(server, model):
    cases = torch.randn(64, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = model(cases).detach()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(post, cases.tolist()))
    assert {status for status, _ in answers} == {200}
    found = torch.tensor([body["outputs"][0]["data"] for _, body in answers]).reshape(64, 2, 3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_triton_request_that_fails_takes_no_other_with_it(server, words):
    ids = [[[index % 10, 3 if index % 5 else 11]] for index in range(40)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda rows: post(rows, "words", "INT64"), ids))
    for index, (status, body) in enumerate(answers):
        if index % 5:
            found = torch.tensor(body["outputs"][0]["data"]).reshape(1, 2, 3)
            torch.testing.assert_close(found, words(torch.tensor(ids[index])).detach(), atol=1e-6, rtol=1e-5)
        else:
            assert (status, "out of range" in body["error"]) == (400, True), body
