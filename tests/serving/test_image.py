"""The images of `examples/serving/container`, built and run by podman: no network, no writable root, no capability.

`SERVE_IMAGE_BASE` names the base: an image with Python, its `venv` and the certificates that pip needs, such as
docker.io/library/python:3.13-slim, or what this makes: `debootstrap --variant=minbase
--include=python3-venv,ca-certificates bookworm root; tar -C root -c . | podman import - python`. `SERVE_IMAGE_BUILD` is
what `podman build` gets beside it.
"""

import json
import os
import shlex
import shutil
import subprocess

import pytest
import torch

import aotexport
from tests.serving.server import ROOT, wait_for
from tests.unit.serving.conftest import digits_model

BASE = os.environ.get("SERVE_IMAGE_BASE")
NAME = "aotexport-test"
RIGHTS = ["--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BASE is None or shutil.which("podman") is None, reason="needs podman and SERVE_IMAGE_BASE"),
]


def podman(*arguments):
    """Return what podman prints."""
    command = ["podman", *map(str, arguments)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if found.returncode:
        raise OSError(found.stdout[-4000:])
    return found.stdout.strip()


def python(code, *arguments):
    """Return what a line of Python prints in the container."""
    return podman("exec", NAME, "/opt/serve/bin/python", "-c", code, *arguments)


def ask(path, body):
    """Return the JSON of an answer to a request that is made in the container."""
    code = (
        "import sys, urllib.request as u\n"
        "request = u.Request(sys.argv[1], sys.argv[2].encode(), {'content-type': 'application/json'})\n"
        "print(u.urlopen(request).read().decode())"
    )
    return json.loads(python(code, f"http://127.0.0.1:8080{path}", json.dumps(body)))


@pytest.fixture(params=["Containerfile", "Containerfile.onnx"])
def image(request):
    """Return the name of an image that is built anew."""
    more = shlex.split(os.environ.get("SERVE_IMAGE_BUILD", ""))
    file = ROOT / "examples/serving/container" / request.param
    name = f"localhost/{NAME}-{request.param.lower()}"
    podman(
        "build", "--layers", "--format", "docker", "--build-arg", f"BASE={BASE}", *more, "-f", file, "-t", name, ROOT
    )
    yield name
    podman("rmi", "--force", name)


@pytest.fixture
def container(image, tmp_path):
    """Run the image over a directory of models."""
    aotexport.export(
        digits_model(), (torch.ones(1, 8),), output=tmp_path / "models/net", programs=("infer",), onnx=True
    )
    for path in (tmp_path, *tmp_path.rglob("*")):  # the user of the image may read them
        path.chmod(0o755 if path.is_dir() else 0o644)
    podman("run", "--detach", "--name", NAME, *RIGHTS, "--volume", f"{tmp_path}/models:/models:ro", image)
    yield image
    podman("rm", "--force", NAME)


def test_image_serves_without_rights(container):
    wait_for(lambda: podman("healthcheck", "run", NAME) == "")
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 8], "data": [float(each) for each in range(8)]}
    answer = ask("/v2/models/net/infer", {"inputs": [tensor]})
    expected = digits_model()(torch.arange(8.0)[None]).ravel()
    torch.testing.assert_close(torch.tensor(answer["outputs"][0]["data"]), expected)
    assert python("import os; print(os.getuid())") == "10001"
    assert "CapEff:\t0000000000000000" in python("print(open('/proc/self/status').read())")
    found = python("import importlib.util as u; print([n for n in ('torch', 'aotexport') if u.find_spec(n)])")
    assert found == ("[]" if container.endswith(".onnx") else "['torch']")
    for place in ("/models/x", "/opt/serve/x"):
        with pytest.raises(OSError, match="Read-only file system"):
            python(f"open('{place}', 'w')")
    podman("stop", "--time", "60", NAME)
    assert podman("inspect", "--format", "{{.State.ExitCode}}", NAME) == "0"
    assert '"message":"server has ended"' in podman("logs", NAME)
