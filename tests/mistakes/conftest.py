"""Fixtures of the tables of mistakes: a working directory of their own, and one small bundle."""

import shutil
from pathlib import Path

import pytest
import torch

import aotexport


@pytest.fixture(scope="session")
def linear_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `nn.Linear(4, 2)`, for one to eight rows; not to be written to."""
    path = tmp_path_factory.mktemp("linear") / "bundle"
    batch = torch.export.Dim("batch", min=1, max=8)
    example = (torch.ones(3, 4),)
    aotexport.export(torch.nn.Linear(4, 2), example, output=path, dynamic_shapes=({0: batch},), verify=False)
    return path


@pytest.fixture
def here(tmp_path: Path, linear_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a bundle `bundle`, a file `weights.pt` and a directory `data` with a file."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(linear_bundle, tmp_path / "bundle")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("1,2\n")
    return tmp_path
