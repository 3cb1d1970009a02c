"""Gradients of calls unlike the captured one: those of eager, or a refusal that says why."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from aotexport_runtime import CallInvalid, NotSupported
from tests.conformance.models import leaf, linear


def test_views_require_grad_as_what_they_are_views_of_does(load):
    def views(x, y):
        doubled, shifted = x * 2, y.sigmoid()
        return x.t(), (x * y).t(), doubled, doubled.t(), shifted[1:], shifted[:1]

    module = load(views, leaf(4, 6), leaf(4, 6))
    for x, y in ((torch.randn(4, 6), leaf(4, 6)), (leaf(4, 6), torch.randn(4, 6))):
        assert [out.requires_grad for out in module(x, y)] == [out.requires_grad for out in views(x, y)]


def test_output_that_is_a_view_may_be_changed_by_the_caller(load):
    def turned(x):
        return (x * 2).t()

    x, twin = leaf(6, 4), leaf(6, 4)
    for function, tensor in ((load(turned, leaf(6, 4)), x), (turned, twin)):
        output = function(tensor)
        output.mul_(2)
        output.sum().backward()
    assert torch.equal(x.grad, twin.grad)


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


def test_part_that_switches_gradients_on_does_so_for_calls_without(load):
    def part(x, y):
        with torch.enable_grad():
            inside = y.sin()
        return inside, x * 2

    module = load(part, torch.randn(3), torch.randn(3))
    with torch.no_grad():
        got, expected = (function(torch.ones(3), leaf(3)) for function in (module, part))
    assert [out.requires_grad for out in got] == [out.requires_grad for out in expected] == [True, False]


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


def test_layers_do_not_fix_the_layout_that_their_kernels_look_at(load):
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
    module, x = load(net, torch.randn(4, 6)), torch.randn(6, 4).t()
    torch.testing.assert_close(module(x), net(x))


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
    with pytest.raises(CallInvalid) as caught:
        module(torch.ones(3), leaf(3))
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `x`: expected requires_grad=True, as at capture, since the model takes gradients with regard to it; got "
        "False"
    )


def test_hooks_run_once_where_gradients_are_differentiable(load):
    net = linear()
    module, x, gradients = load(net, torch.randn(4, 3)).train(), torch.randn(4, 3), []
    for function in (module, net):
        weight = next(function.parameters())
        weight.register_hook(lambda gradient: gradient * 2)
        gradients.append(torch.autograd.grad(function(x).sum(), weight, create_graph=True))
    torch.testing.assert_close(*gradients)


def test_changed_weight_is_noticed_where_gradients_are_differentiable(load):
    net = linear()
    module, x = load(net, torch.randn(4, 3)).train(), leaf(4, 3)
    for function in (module, net):
        total, weight = function(x).sum(), list(function.parameters())[2]
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, x, create_graph=True)


class Doubled(torch.autograd.Function):
    """x * 2, with a forward-mode derivative of its own."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 5

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 11


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_through_a_custom_function_is_refused(load):
    module = load(Doubled.apply, leaf(3))
    with pytest.raises(NotSupported, match=r"inside of torch\.func or forward-mode AD"):
        torch.func.jvp(module, (torch.ones(3),), (torch.ones(3),))
