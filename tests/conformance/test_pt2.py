"""Files of `torch.export` made of bundles: torch alone loads them, and they do what the bundle does."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers.utils import ModelOutput

import aotexport
from aotexport import ExportFailed, ModelFileInvalid, OutputExists
from aotexport.cli.app import app
from aotexport_runtime import load
from tests.refusals import refusal

BATCH = torch.export.Dim("batch", min=2, max=64)


class Pair(NamedTuple):
    first: torch.Tensor
    count: int


class Net(nn.Module):
    """Tied weights, dropout, running statistics, results of two classes, a weight at the root."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x, shift=None):
        hidden = self.encoder(x)
        return ModelOutput(out=self.first(hidden) * self.scale, more=Pair(self.second(hidden), x.shape[0]))


@pytest.fixture(scope="module")
def bundle(new_bundle):
    torch.manual_seed(0)
    return new_bundle(Net(), torch.randn(6, 4), dynamic_shapes={"x": {0: BATCH}, "shift": None})


@pytest.mark.parametrize("program", ["infer", "train"])
def test_file_does_what_the_bundle_does(bundle, tmp_path, program):
    aotexport.convert(bundle, tmp_path / "net.pt2", program=program)
    exported = torch.export.load(tmp_path / "net.pt2")
    module, ours = exported.module(), load(bundle)
    ours.train(program == "train")
    assert set(exported.state_dict) == set(ours.state_dict())
    x = torch.randn(9, 4)
    torch.manual_seed(1)
    expected = ours(x)
    torch.manual_seed(1)
    result = module(x)
    assert torch.equal(result["out"], expected["out"])
    assert torch.equal(result["more"][0], expected["more"].first)
    assert result["more"][1] == expected["more"].count == 9
    assert torch.equal(dict(module.named_buffers())["encoder.1.running_mean"], ours.encoder[1].running_mean)
    if program == "train":
        result["out"].sum().backward()
        expected["out"].sum().backward()
        # Of weights that are tied, torch's file has both names, and the graph reads one.
        assert torch.equal(dict(module.named_parameters())["second.weight"].grad, ours.first.weight.grad)
        assert torch.equal(dict(module.named_parameters())["scale"].grad, ours.scale.grad)


def test_file_loads_with_torch_alone(bundle, tmp_path):
    assert CliRunner().invoke(app, ["convert", str(bundle), str(tmp_path / "net.pt2")]).exit_code == 0
    code = (
        "import sys, torch; print(torch.export.load('net.pt2').module()(torch.ones(3, 4))['out'].shape); "
        "print([name for name in sys.modules if name.startswith('aotexport')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[:2] == ["torch.Size([3, 2])", "[]"]


def branching(x):
    return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        ("net.pt", {}, ModelFileInvalid, "`net.pt` does not end with `.pt2`, by which readers know such a file"),
        (
            "net.pt2",
            {"program": "encode"},
            ModelFileInvalid,
            "no program `encode` of `forward`; there are train, infer",
        ),
        ("there.pt2", {}, OutputExists, "`there.pt2` exists; choose another place, or replace a file by `--force`"),
    ],
)
def test_wrong_arguments_are_refused(bundle, tmp_path, monkeypatch, make, options, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt2").write_text("mine")
    assert refusal(error, aotexport.convert, bundle, make, **options) == message
    assert [path.name for path in tmp_path.iterdir()] == ["there.pt2"]


def region(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branching, r"program `train` checks values of its calls, since the model's code branches on them"),
        (region, r"`torch.export` does not take program `train`: Could not guard on data-dependent expression"),
    ],
)
def test_programs_that_torch_cannot_hold_are_refused_and_leave_nothing(load, tmp_path, function, message):
    module = load(function, torch.ones(3, requires_grad=True))
    with pytest.raises(ExportFailed, match=message):
        aotexport.convert(module, tmp_path / "files" / "net.pt2")
    assert not [path for path in tmp_path.rglob("*") if ".pt2" in path.name]
