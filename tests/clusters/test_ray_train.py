"""The example of Ray Train on a local Ray of two workers, one of them killed.

Needs `pip install 'ray[train]'`, which is no part of the development environment.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import aotexport
import aotexport_runtime

ray = pytest.importorskip("ray", reason="needs `pip install 'ray[train]'`")
pytest.importorskip("ray.train.torch", reason="needs `pip install 'ray[train]'`")

EXAMPLES = Path(__file__).parents[2] / "examples/finetune"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("ray") / "reader"
    definition = runpy.run_path(str(EXAMPLES / "model.py"))
    aotexport.export(
        definition["model"](),
        definition["example_inputs"](),
        output=path,
        dynamic_shapes=definition["dynamic_shapes"],
        verify=False,
    )
    return path


@pytest.fixture(scope="module")
def train():
    """The example's module, with a local Ray whose workers find what it imports."""
    with pytest.MonkeyPatch.context() as patch:
        for path in (EXAMPLES / "deploy", EXAMPLES / "ray"):
            patch.syspath_prepend(str(path))
        paths = ":".join(filter(None, sys.path))
        variables = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=False)
        import train

        yield train
        ray.shutdown()


def run(train, bundle, directory):
    config = {"bundle": str(bundle), "tuned": str(directory / "tuned"), "checkpoints": str(directory / "checkpoints")}
    train.trainer(config, 2, str(directory / "ray")).fit()
    return aotexport_runtime.load(directory / "tuned").state_dict()


def workers() -> list[int]:
    """Return the processes of Ray's workers that descend from this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command, status = (entry / "cmdline").read_text(), (entry / "stat").read_text()
        except (OSError, ValueError):
            continue
        if command.startswith("ray::") and "TrainWorker" in command:
            found.append((int(entry.name), int(status.rpartition(")")[2].split()[1])))
    return [process for process, parent in found if _descends(parent)]


def _descends(process: int) -> bool:
    while process > 1 and process != os.getpid():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process == os.getpid()


def kill_one_after(checkpoint: Path, killed: list[int]) -> None:
    while not checkpoint.exists():
        time.sleep(0.02)
    killed.append(workers()[0])
    os.kill(killed[0], signal.SIGKILL)


def test_ray_train_when_a_worker_is_killed_reaches_the_same_weights_from_the_last_checkpoint(train, bundle, tmp_path):
    expected = run(train, bundle, tmp_path / "whole")
    checkpoints = tmp_path / "killed/checkpoints"
    first = sorted((tmp_path / "whole/checkpoints").iterdir())[0].name
    killed: list[int] = []
    killer = threading.Thread(target=kill_one_after, args=(checkpoints / first / ".metadata", killed), daemon=True)
    killer.start()
    found = run(train, bundle, tmp_path / "killed")
    killer.join()
    assert len(killed) == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
