"""NaN on one side is a disagreement, whoever compares; on both sides at one place it is what eager gives."""

import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.cli import app
from aotexport_runtime.cli.app import main as runtime
from tests.hostile.crafted import FILES, Crafted


@pytest.fixture
def planted(tiny, tmp_path):
    """Return a bundle whose recorded gradient has a NaN that calls do not give."""
    return with_nan(tiny, tmp_path / "planted", "call 0: gradient of linear.weight")


def with_nan(bundle: Path, directory: Path, value: str) -> Path:
    crafted = Crafted(bundle, directory)
    key = f"v{crafted.document('vector')['values'].index(value)}"
    file = crafted.root / FILES["vector"].replace(".json", ".safetensors")
    tensors = load_file(file)
    tensors[key].flatten()[-1] = math.nan
    save_file(tensors, file)
    return crafted.seal()


FAULTS = {
    "autograd": "  train/example, forward graph (autograd): call 0: gradient of linear.weight: relative error inf",
    "portable": "  train/example, joint graph (portable): call 0: gradient of linear.weight: relative error inf",
}


@pytest.mark.parametrize("target", ["auto", "portable", "autograd"])
def test_self_test_fails(planted, target):
    with pytest.raises(aotexport_runtime.SelfTestFailed) as caught:
        aotexport_runtime.selftest(planted, target=target)
    lines = [line for name, line in FAULTS.items() if target in ("auto", name)]
    assert str(caught.value) == "\n".join(["the bundle disagrees with eager execution:", *lines])


def test_commands_fail_and_show_the_error_as_the_largest(planted, capsys):
    assert runtime(["selftest", str(planted)]) == 1
    printed = capsys.readouterr().out
    assert "train, joint graph (portable): FAILED, outputs, gradients and state of " in printed
    assert "relative error inf, " in printed

    result = CliRunner().invoke(app, ["verify", str(planted)])
    assert result.exit_code == 1
    assert (
        "train/example, joint graph (portable): call 0: gradient of linear.weight: relative error inf" in result.stdout
    )


class Tracing(nn.Module):
    """Gives NaN for one element, in eager mode alone or in a trace alone."""

    def __init__(self, in_trace: bool):
        super().__init__()
        self.in_trace, self.weight = in_trace, nn.Parameter(torch.ones(3))

    def forward(self, x):
        if torch.compiler.is_compiling() is self.in_trace:
            x = x.where(x > 0, math.nan)
        return x * self.weight


@pytest.mark.parametrize("in_trace", [False, True])
def test_export_is_refused(tmp_path, in_trace):
    with pytest.raises(aotexport.VerificationFailed, match=r"^the bundle .*; nothing was written:\n") as caught:
        aotexport.export(Tracing(in_trace), (torch.tensor([1.0, -1.0, 2.0]),), output=tmp_path / "b")
    assert [line.partition(" (and in ")[0] for line in caught.value.report if "output" in line] == [
        "  train/example (autograd): call 0: output: relative error inf",
        "  infer/example (autograd): call 0: output: relative error inf",
    ]


def test_nan_that_eager_gives_is_agreement(tmp_path):
    def divided(x, w):
        return (x * w / x.abs().sum(1, keepdim=True)).log()

    x, w = torch.tensor([[0.0, 0.0], [1.0, -2.0]]), torch.ones(2, requires_grad=True)
    aotexport.export(divided, (x, w), output=tmp_path / "b", programs=("infer",))
    assert {result.agrees for result in aotexport_runtime.selftest(tmp_path / "b")} == {True}
    assert aotexport_runtime.load(tmp_path / "b")(x, w).isnan().tolist() == [[True, True], [False, True]]
