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


class Net(torch.nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


@pytest.fixture(scope="session")
def net_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `Net`; not to be written to."""
    path = tmp_path_factory.mktemp("net") / "bundle"
    aotexport.export(Net(), (torch.ones(3, 4),), output=path, verify=False)
    return path


@pytest.fixture
def here(tmp_path: Path, linear_bundle: Path, net_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with bundles `bundle` and `net`, a file `weights.pt` and a directory `data` with a file."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(linear_bundle, tmp_path / "bundle")
    shutil.copytree(net_bundle, tmp_path / "net")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("1,2\n")
    return tmp_path
