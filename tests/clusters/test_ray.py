"""The example of Ray Serve on a local Ray: two replicas, one of them killed under load.

Needs `pip install 'ray[serve]'`, which is no part of the development environment (200 MB, 40 packages).
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import aotexport

ray = pytest.importorskip("ray", reason="needs `pip install 'ray[serve]'`")
serve = pytest.importorskip("ray.serve", reason="needs `pip install 'ray[serve]'`")

EXAMPLE = Path(__file__).parents[2] / "examples/serving/ray"
PORT = 18123
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


@pytest.fixture(scope="module")
def application(model, tmp_path_factory):
    """Serve two bundles on a local Ray by two replicas."""
    repository = tmp_path_factory.mktemp("repository")
    batch = torch.export.Dim("batch", min=1, max=64)
    for name in ("first", "second"):
        aotexport.export(
            model,
            (torch.ones(5, 8),),
            output=repository / name,
            dynamic_shapes=({0: batch},),
            programs=("infer",),
            verify=False,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        paths = ":".join([str(EXAMPLE), *filter(None, sys.path)])
        ray.init(
            num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False
        )
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        patch.syspath_prepend(str(EXAMPLE))
        import bundles

        serve.run(bundles.app({"repository": str(repository), "min_replicas": 2, "max_replicas": 2, "cpus": 0.5}))
        yield
        serve.shutdown()
        ray.shutdown()


def post(name, rows):
    """Return the status and the body of an answer."""
    data = torch.tensor(rows)
    tensor = {"name": "input", "datatype": "FP32", "shape": list(data.shape), "data": data.ravel().tolist()}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v2/models/{name}/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def replicas():
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if "#Bundles#" in name]


def test_ray_when_a_replica_is_killed_under_load_answers_every_request_right(application, model):
    cases = torch.randn(64, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = model(cases).detach()
    retried = threading.Semaphore(0)

    def ask(index):
        for _ in range(60):
            status, body = post(("first", "second")[index % 2], cases[index % 64].tolist())
            if status == 200:
                found = torch.tensor(body["outputs"][0]["data"]).reshape(2, 3)
                return torch.allclose(found, expected[index % 64], atol=1e-6)
            retried.release()
            time.sleep(0.5)
        return False

    assert ask(0)
    assert ask(1)
    before = replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask, index) for index in range(400)]
        answers[100].result()
        ray.kill(ray.get_actor(before[0], namespace="serve"), no_restart=True)
        assert all(answer.result() for answer in answers)
    for _ in range(60):
        if len(replicas()) == 2:
            break
        time.sleep(0.5)
    assert len(replicas()) == 2
    assert before[0] not in replicas()


def test_config_of_a_cluster_is_one_that_ray_takes():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLE / "config.yaml").read_text()))
    assert [each.import_path for each in config.applications] == ["bundles:app"]
