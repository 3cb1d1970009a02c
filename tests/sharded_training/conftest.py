"""Processes of one group, and the bundle that they train."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sharded_training.models import export

Run = Callable[..., list[str]]

TIMEOUT_S = 600
"""How long ranks may take, on a busy machine; ranks that wait for each other would take half an hour."""

EXPECTED = ("FSDP2-wrapped module", "`torch.jit.")
"""Beginnings of warnings that eager gives as well."""


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "network"
    export(path)
    return path


@pytest.fixture
def start_ranks(tmp_path, bundle) -> Callable[..., list[subprocess.Popen[str]]]:
    """Return a function that starts a module of this package once per rank."""

    def start(module: str, ranks: int, *args: str) -> list[subprocess.Popen[str]]:
        own = tmp_path / "network"
        if not own.exists():
            shutil.copytree(bundle, own)
        (tmp_path / "store").unlink(missing_ok=True)
        ignored = [option for message in EXPECTED for option in ("-W", f"ignore:{message}")]
        command = [sys.executable, "-W", "error", *ignored, "-m", f"tests.sharded_training.{module}", str(own)]
        return [
            subprocess.Popen(
                [*command, str(rank), str(ranks), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]

    return start


@pytest.fixture
def run_ranks(start_ranks) -> Run:
    """Return a function that runs a module of this package, once per rank, and returns what the ranks print."""

    def run(module: str, ranks: int, *args: str) -> list[str]:
        processes = start_ranks(module, ranks, *args)
        finished = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        assert [process.returncode for process in processes] == [0] * ranks, finished[0][1]
        return [out for out, _ in finished]

    return run
