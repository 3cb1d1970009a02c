"""Bundles that are replaced while a process serves them: it goes on as it began."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A link to the bundle `linear`, with the bundle `deep` of another model beside it."""
    monkeypatch.chdir(tmp_path)
    aotexport.export(nn.Linear(4, 2), (X,), output="linear", verify=False)
    aotexport.export(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), (X,), output="deep", verify=False)
    os.symlink("linear", "served")
    return Path("served")


def test_replaced_link_serves_new_loads_and_leaves_running_ones(served: Path) -> None:
    module = aotexport_runtime.load(served).eval()
    before = module(X)
    os.symlink("deep", "served.new")
    os.replace("served.new", served)
    assert torch.equal(module(X), before)
    # A program that was not called before is read now.
    assert torch.equal(module.train()(X), before)
    assert aotexport_runtime.load(served).bundle.manifest.name == "Sequential"
