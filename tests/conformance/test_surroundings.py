"""The caller's modes, hooks and random state: eager's result, or a refusal that says why."""

import pytest
import torch
from torch import nn

import aotexport_runtime
from aotexport_runtime import CallInvalid, NotSupported
from tests import models
from tests.conformance.models import linear


def test_argument_that_was_the_modules_own_must_be_it_again(load):
    net = models.module(lambda self, x, scale: x * scale + self.scale, scale=nn.Parameter(torch.rand(3)))
    module, x = load(net, torch.ones(3), net.scale), torch.rand(3)
    assert torch.equal(module(x, module.scale), net(x, net.scale))
    with pytest.raises(CallInvalid, match="an argument that was the module's own `scale` at capture must be it again"):
        module(x, torch.rand(3))


def test_export_and_save_leave_the_random_state(tmp_path, load):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    state = torch.get_rng_state()
    aotexport_runtime.save(load(net, torch.ones(2, 4), verify=True, target="auto"), tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_traced_module_is_that_of_the_forward_graph(load):
    net = linear()
    module, x = load(net, torch.randn(4, 3), target="portable").train(), torch.randn(4, 3)
    torch.testing.assert_close(torch.jit.trace(module, (x + 1,))(x), net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_trace_of_dynamic_sizes_is_refused(load):
    module = load(linear(), torch.randn(4, 3), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    with pytest.raises(NotSupported, match="would hold the sizes of this call for the only ones"):
        torch.jit.trace(module, (torch.randn(4, 3),))


class ByGradMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        with torch.no_grad():
            assert not torch.is_grad_enabled()
        return x * self.weight if torch.is_grad_enabled() else x - self.weight


def test_code_that_reads_the_grad_mode_is_captured_in_that_of_the_program(load):
    module, x = load(ByGradMode(), torch.randn(3), verify=True), torch.arange(3.0)
    assert torch.equal(module(x), x)
    with torch.no_grad():
        assert torch.equal(module.eval()(x), x - 1)
        with pytest.raises(CallInvalid, match=r"expected torch.is_grad_enabled\(\) to be True, as at capture"):
            module.train()(x)


class AskingBeside(nn.Linear):
    checkpoints = False

    def forward(self, x):
        if torch.is_grad_enabled() and self.checkpoints:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


@pytest.mark.parametrize("shapes", [None, ({0: torch.export.Dim("rows", min=2)},)], ids=["static", "dynamic"])
def test_code_that_reads_the_grad_mode_and_does_the_same_in_both_is_served_in_both(load, shapes):
    example = torch.randn(4, 3)
    module, x = load(AskingBeside(3, 2), example, dynamic_shapes=shapes, verify=True), torch.randn(4, 3)
    for called in (module.train(), module.eval()):
        with torch.no_grad():
            expected = called(x)
        assert torch.equal(called(x), expected)
        assert called(x).requires_grad
