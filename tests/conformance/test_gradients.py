"""Gradients of calls unlike the captured one: those of eager, or a refusal that says why."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from aotexport_runtime import CallInvalid
from tests.conformance.models import leaf, linear


def test_views_require_grad_as_what_they_are_views_of_does(load):
    def views(x, y):
        doubled, shifted = x * 2, y.sigmoid()
        return x.t(), (x * y).t(), doubled, doubled.t(), shifted[1:], shifted[:1]

    module = load(views, leaf(4, 6), leaf(4, 6))
    for x, y in ((torch.randn(4, 6), leaf(4, 6)), (leaf(4, 6), torch.randn(4, 6))):
        assert [out.requires_grad for out in module(x, y)] == [out.requires_grad for out in views(x, y)]


def test_batched_gradients_are_those_of_eager(load):
    net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    module, x = load(net, torch.randn(4, 3)), leaf(4, 3)
    module.train()
    got, expected = (torch.autograd.functional.jacobian(f, x, vectorize=True) for f in (module, net))
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives_are_those_of_eager(load):
    net = linear()
    module, x = load(net, torch.randn(4, 3)), torch.randn(4, 3)
    with forward_ad.dual_level():
        got, expected = (
            forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(4, 3)))).tangent for f in (module, net)
        )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()),
        nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))),
    ],
    ids=["changed buffers", "view of a result"],
)
def test_gradient_penalty_is_that_of_eager(load, net):
    torch.manual_seed(0)
    net.double()
    module, results = load(net.train(), leaf(5, 3).double()).train(), []
    x = torch.randn(5, 3, dtype=torch.double)
    for function in (copy.deepcopy(net), module):
        function.zero_grad()
        point = x.clone().requires_grad_()
        output = function(point).square().sum()
        (gradient,) = torch.autograd.grad(output, point, create_graph=True)
        (output + gradient.square().sum()).backward()
        results.append((gradient, point.grad, [p.grad for p in function.parameters()], list(function.buffers())))
    torch.testing.assert_close(*results)


def test_views_that_require_grad_are_recorded_as_views_of_one_tensor(load):
    def overlapping(x, y):
        return (x.contiguous() + 2 * y).sum(), x.add_(1)

    base = leaf(6, 4).clone()
    module = load(overlapping, base[:3], base[2:5], verify=True)
    results = []
    for function in (module, overlapping):
        root = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
        whole = root.clone()
        output, _ = function(whole[:3], whole[2:5])
        output.backward()
        results.append((output, root.grad, whole))
    torch.testing.assert_close(*results)


def test_buffer_that_takes_part_in_autograd_is_left_as_it_was(load):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            self.last.copy_(self.weight * x)
            return self.last.sum()

    net = Net()
    module = load(net, torch.randn(3), verify=True)
    assert not net.last.requires_grad
    results = []
    for function in (net, module):
        for _ in range(2):
            output = function.train()(torch.ones(3))
        output.backward()
        results.append((output, function.weight.grad, function.last))
    torch.testing.assert_close(*results)


def test_gradients_of_gradients_go_through_the_same_dropout(load):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)).train()
    module = load(net, torch.randn(4, 6)).train()
    x, penalties = torch.randn(4, 6), []
    for function in (module, net):
        torch.manual_seed(3)
        weight = next(function.parameters())
        (gradient,) = torch.autograd.grad(function(x).sum(), weight, create_graph=True)
        penalties.append((gradient, *torch.autograd.grad(gradient.square().sum(), weight)))
    torch.testing.assert_close(*penalties)


def test_argument_without_gradients_is_refused_where_the_model_differentiates_it(load):
    def slope(x, w):
        return torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)[0]

    module = load(slope, leaf(3), leaf(3))
    assert torch.equal(module(x := leaf(3), w := torch.ones(3)), slope(x, w))
    with pytest.raises(CallInvalid, match="`x`: expected requires_grad=True, as at capture"):
        module(torch.ones(3), leaf(3))
