"""Bundles that are replaced while others load them."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import aotexport_runtime


def replaced(bundle: Path, loads: int) -> Counter[str]:
    """Load a bundle so often, and replace it meanwhile; return how often each was done, if no one failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.writers.replacing", str(bundle), str(loads)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [error for report in reports for error in report["errors"]] == []
    assert len(reports) == 11
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]
    return sum((Counter({report["work"]: report["done"]}) for report in reports), Counter[str]())


@pytest.mark.slow
def test_bundle_is_replaced_by_three_and_loaded_by_eight_without_an_error(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "bundle")
    done = replaced(tmp_path / "bundle", 10_000)
    assert done["load"] == 10_000
    assert done["write"] >= 3


def test_loaded_module_runs_on_after_its_bundle_was_replaced_by_another_model(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(tiny, path)
    module, other = (aotexport_runtime.load(path) for _ in range(2))
    expected = other(torch.ones(3, 4))["best"]
    for parameter in other.parameters():
        parameter.data.zero_()
    aotexport_runtime.save(other, path, force=True)
    assert torch.equal(module(torch.ones(3, 4))["best"], expected)
    assert not torch.equal(aotexport_runtime.load(path)(torch.ones(3, 4))["best"], expected)


def test_last_reader_of_a_replaced_bundle_removes_it(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(tiny, path)
    opened = aotexport_runtime.open_bundle(path)
    module = aotexport_runtime.load(tiny)
    aotexport_runtime.save(module, path, force=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert opened.graph("infer", opened.program("infer").forward.file).nodes
    del opened
    assert list(tmp_path.iterdir()) == [path]
