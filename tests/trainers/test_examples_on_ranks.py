"""Trainers' own launchers on two ranks, as users start them, each run beside the same one of the original network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

import aotexport_runtime
from aotexport_runtime import adapters

EXAMPLES = Path(__file__).parents[2] / "examples/finetune"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch"]
TRAINER, LIGHTNING, SCRIPT = (str(EXAMPLES / f"{name}.py") for name in ("trainer", "with_lightning", "with_accelerate"))
ON_PROCESSORS = str(Path(__file__).with_name("fsdp_on_processors.py"))

WAYS = {
    "Trainer by torchrun": ([*TORCHRUN, TRAINER], 112),
    "Lightning, ddp": ([LIGHTNING, "--ranks", "2", "--strategy", "ddp"], 116),
    "Lightning, fsdp": ([LIGHTNING, "--ranks", "2", "--strategy", "fsdp"], 116),
    "accelerate, ddp": ([*ACCELERATE, "--multi_gpu", "--num_processes", "2", SCRIPT], 116),
    "accelerate, fsdp": ([*ACCELERATE, "--config_file", str(EXAMPLES / "fsdp.yaml"), ON_PROCESSORS, SCRIPT], 116),
}
"""What starts two ranks, and the number of steps."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the examples' network."""
    path = tmp_path_factory.mktemp("examples") / "reader"
    command = [sys.executable, "-m", "aotexport", str(EXAMPLES / "model.py"), "-o", str(path), "--no-verify"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def losses(way: str, directory: Path, *arguments: str) -> list[float]:
    """Run a script in a directory of its own; return the loss of every step."""
    directory.mkdir()
    command = [sys.executable, *WAYS[way][0], *arguments, "--report", "report.json"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((directory / "report.json").read_text(encoding="utf-8"))["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_trainer_on_two_ranks_trains_the_bundle_as_the_original(reader: Path, tmp_path: Path, way: str) -> None:
    found = losses(way, tmp_path / "bundle", str(reader))
    expected = losses(way, tmp_path / "eager", "--eager")
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found) == WAYS[way][1]
    assert sum(found[-10:]) < 0.4 * sum(found[:10])
    assert accuracy(written(reader, tmp_path / "bundle")) > 0.85


def written(reader: Path, directory: Path) -> torch.nn.Module:
    """Return the bundle with the adapter that a run wrote, or the bundle that it wrote."""
    if (directory / "tuned").exists():
        return aotexport_runtime.load(directory / "tuned")
    module = aotexport_runtime.load(reader)
    adapters.load_adapter(module, directory / "adapter")
    return module


@torch.no_grad()
def accuracy(module: torch.nn.Module) -> float:
    """Return which part of the digits is recognised."""
    data: Any = load_digits()
    results = module.eval()(torch.tensor(data.images / 16, dtype=torch.float32)).argmax(1)
    return (results == torch.tensor(data.target)).double().mean().item()
