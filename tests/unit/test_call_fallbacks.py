"""Calls that only the forward graph gets right, and what a failing call leaves behind."""

from __future__ import annotations

import pytest
import torch

import aotexport
import aotexport_runtime


@pytest.fixture
def load(tmp_path):
    """Return a function that exports a function and loads the bundle."""

    def export_and_load(function, *args, target="auto"):
        aotexport.export(function, args, output=tmp_path / "bundle", verify=False)
        return aotexport_runtime.load(tmp_path / "bundle", target=target)

    return export_and_load


def second_half_of_doubled(x):
    x.mul_(2)
    return x.split(2)[1]


@pytest.mark.parametrize("offset", [0, 3])
def test_view_without_steps_of_a_written_input_is_of_the_callers_elements(load, offset):
    module = load(second_half_of_doubled, torch.arange(6.0))
    base, expected = torch.arange(12.0), torch.arange(12.0)

    view = module(base[offset : offset + 6])
    second_half_of_doubled(expected[offset : offset + 6]).neg_()
    view.neg_()

    assert torch.equal(base, expected)


def fails_inside_of_regions(x, index):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return x[index] * 2


def test_call_that_fails_inside_of_a_region_restores_grad_mode_and_autocast(load):
    module = load(fails_inside_of_regions, torch.ones(3, requires_grad=True), torch.tensor([0]), target="autograd")

    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        module(torch.ones(3, requires_grad=True), torch.tensor([9]))

    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


class Recurrent(torch.nn.Module):
    """A recurrent layer, which AOTAutograd takes apart step by step, or a linear one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("layer", "target", "runs"),
    [
        (torch.nn.GRU(3, 3), "auto", "forward graph"),
        (torch.nn.GRU(3, 3), "portable", "joint graph"),
        (torch.nn.Linear(3, 3), "auto", "joint graph"),
    ],
    ids=["recurrent", "recurrent by its joint graph", "linear"],
)
def test_programs_that_a_joint_graph_unrolls_run_their_forward_graph(tmp_path, caplog, layer, target, runs):
    caplog.set_level("INFO", "aotexport_runtime")
    x = torch.randn(12, 2, 3)
    module = Recurrent(layer)
    aotexport.export(module, (x,), output=tmp_path / "bundle", verify=False)
    loaded = aotexport_runtime.load(tmp_path / "bundle", target=target)
    caplog.clear()

    results = [output if isinstance(output, torch.Tensor) else output[0] for output in (loaded(x), module(x))]

    torch.testing.assert_close(*results)
    by_joint_graph = results[0].grad_fn.name() == "_JointBackward"
    assert ("joint graph" if by_joint_graph else "forward graph") == runs
    assert ["runs its forward graph" in record.getMessage() for record in caplog.records] == [True] * (
        not by_joint_graph
    )
