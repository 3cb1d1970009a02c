"""Exported models, forward and backward on their kernels, equal what eager recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aotexport
from aotexport.lower.cuda import compile as compilation
from tests.interpreter.models import QUICK, SLOW

ROOT = Path(__file__).parents[2]
EVERY = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def interpreted(bundle: Path, candidate: int = 0) -> dict:
    """Return what `python -m tests.interpreter` prints of a bundle."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.interpreter", str(bundle), str(candidate)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def exported(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> aotexport.ExportReport:
    # What is interpreted are the sources; compiled code has tests of its own.
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))
    torch.manual_seed(0)
    model, args, options = {**QUICK, **SLOW}[name]()
    return aotexport.export(model, args, output=directory, programs="train", targets=("cuda",), verify=False, **options)


@pytest.mark.parametrize("name", EVERY)
def test_model_on_interpreted_kernels_equals_eager(name, tmp_path, monkeypatch):
    report = exported(name, tmp_path / "bundle", monkeypatch)
    assert report.notes == []

    result = interpreted(tmp_path / "bundle")

    assert result["failures"] == []
    assert "train/example" in result["compared"]
    kernels = {launch.partition("/")[0] for launch in result["launches"]}
    assert kernels == {kernel.name for program in report.programs for kernel in program.lowered["cuda"].kernels}


@pytest.mark.slow
@pytest.mark.parametrize("candidate", [1, 2])
def test_other_candidates_equal_eager(candidate, tmp_path, monkeypatch):
    exported("mlp", tmp_path / "bundle", monkeypatch)
    assert interpreted(tmp_path / "bundle", candidate)["failures"] == []
