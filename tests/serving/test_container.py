"""A server with the rights of `examples/serving/container`: no capability, read-only files, a network of its own.

Runs the environment of the tests in namespaces of Linux, and no image: an image takes minutes to build, and a machine
that runs containers.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

USER = 10001
NEEDED = ("unshare", "nsenter", "setpriv", "ip")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root of Linux makes namespaces"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif(
        any(not folder.stat().st_mode & 1 for folder in Path(sys.executable).resolve().parents),
        reason="the interpreter is in a directory that other users may not enter",
    ),
]

SERVE = """
    set -e
    ip link set lo up
    mount -t tmpfs tmpfs {scratch}
    mount --bind / /
    mount -o remount,ro,bind /
    export TMPDIR={scratch} HOME={scratch}
    exec setpriv --reuid {user} --regid {user} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs \\
        {python} -m aotexport_runtime serve {bundle} --name net --http-port 8080 --grpc-port 8081
"""


@pytest.fixture
def confined(exported, tmp_path):
    """Serve a bundle as the container does; return the number of a process inside."""
    shutil.copytree(exported("digits"), tmp_path / "bundle")
    (tmp_path / "scratch").mkdir(mode=0o777)
    for folder in (tmp_path, *tmp_path.parents):  # the user of the container may enter them
        if folder.name.startswith(("test_", "pytest-")):
            folder.chmod(0o755)
    script = SERVE.format(scratch=tmp_path / "scratch", user=USER, python=sys.executable, bundle=tmp_path / "bundle")
    command = ["unshare", "--mount", "--net", "--propagation", "private", "bash", "-c", textwrap.dedent(script)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        yield process
        process.terminate()
        assert process.wait(60) == 0


def ask(process, path, body=None):
    """Return an answer to a request that is made inside of the namespace, or None."""
    code = (
        "import sys, urllib.request\n"
        "url, body = sys.argv[1], sys.argv[2].encode() or None\n"
        "request = urllib.request.Request(url, body, {'content-type': 'application/json'})\n"
        "print(urllib.request.urlopen(request).read().decode())"
    )
    command = ["nsenter", "--target", str(process.pid), "--net", sys.executable, "-c", code]
    url = f"http://127.0.0.1:8080{path}"
    found = subprocess.run([*command, url, json.dumps(body) if body else ""], capture_output=True, check=False)
    return found.stdout.decode() if found.returncode == 0 else None


def test_server_without_rights_answers(confined, exported):
    for _ in range(120):
        assert confined.poll() is None
        if ask(confined, "/v2/health/ready") is not None:
            break
        time.sleep(0.5)
    status = Path(f"/proc/{confined.pid}/status").read_text()
    assert f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}" in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 8], "data": [float(each) for each in range(8)]}
    answer = json.loads(ask(confined, "/v2/models/net/infer", {"inputs": [tensor]}))
    from tests.unit.serving.conftest import digits_model

    expected = digits_model()(torch.arange(8.0)[None]).ravel()
    torch.testing.assert_close(torch.tensor(answer["outputs"][0]["data"]), expected)
