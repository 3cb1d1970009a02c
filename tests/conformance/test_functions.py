"""Custom autograd functions by the forward graph: the calls that a joint graph does not serve, equal to eager."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotexport
import aotexport_runtime
from tests.cases import functions as cases

TARGETS = ("portable", "autograd")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that loads a bundle of a function of tensors, which it exports once."""
    bundles = {}

    def export_and_load(function, args, target):
        if function not in bundles:
            path = tmp_path_factory.mktemp("bundles") / "bundle"
            aotexport.export(function, args, output=path, verify=False)
            bundles[function] = path
        return aotexport_runtime.load(bundles[function], target=target)

    return export_and_load


def scaled(x, w):
    return cases.Scale.apply(x, w, 2.0)


bound = cases.Scale.apply
"""As PyTorch's documentation advises."""


def scaled_by_a_bound_function(x, w):
    return bound(x, w, 2.0)


def inputs(*, x=True, w=True):
    torch.manual_seed(0)
    return torch.randn(3, 4).requires_grad_(x), torch.randn(4).requires_grad_(w)


def gradients_of(function):
    tensors = inputs()
    function(*tensors).sum().backward()
    return [tensor.grad for tensor in tensors]


def wanted(tensors):
    return [tensor for tensor in tensors if tensor.requires_grad]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pattern", [(True, True), (False, True)])
def test_function_differentiated_twice_equals_eager(load, target, pattern):
    module = load(scaled, inputs(), target)
    found = []
    for function in (module, scaled):
        tensors = inputs(x=pattern[0], w=pattern[1])
        first = torch.autograd.grad(function(*tensors).sin().sum(), wanted(tensors), create_graph=True)
        second = torch.autograd.grad(sum((grad**2).sum() for grad in first), wanted(tensors), allow_unused=True)
        found.append((first, second))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("target", TARGETS)
def test_bound_function_has_its_own_backward(load, target):
    module = load(scaled_by_a_bound_function, inputs(), target)
    torch.testing.assert_close(gradients_of(module), gradients_of(scaled))


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_function_bound_where_no_trace_sees_it_is_refused_or_has_its_own_backward(load, in_checkpoint):
    apply = cases.Scale.apply

    def scaled_by_a_cell(x, w):
        # Torch's own code calls it within a checkpoint.
        return checkpoint(apply, x, w, 2.0, use_reentrant=False) if in_checkpoint else apply(x, w, 2.0)

    if not isinstance(vars(torch.autograd.Function)["apply"], classmethod):
        with pytest.raises(aotexport.ExportFailed, match="a bound `apply` of the custom autograd function `Scale`"):
            load(scaled_by_a_cell, inputs(), "portable")
        return
    module = load(scaled_by_a_cell, inputs(), "portable")
    torch.testing.assert_close(gradients_of(module), gradients_of(scaled))


@pytest.mark.parametrize("target", ["autograd"])
def test_function_to_be_differentiated_once_raises_as_eager_does(load, target):
    def once(x):
        return cases.Once.apply(x)

    for function in (load(once, (torch.randn(3, requires_grad=True),), target), once):
        x = torch.randn(3, requires_grad=True)
        (grad,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


class HandsOn(torch.autograd.Function):
    """Returns each gradient as it came, to the other input."""

    @staticmethod
    def forward(ctx, x, y, materializes):
        ctx.set_materialize_grads(materializes)
        return y * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return second, first, None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("materializes", [True, False])
def test_undefined_gradient_that_a_function_hands_on_is_zeros_where_it_asks_for_them(load, target, materializes):
    def swapped(x, y, z):
        return *HandsOn.apply(x.sin(), y * 2, materializes), z * 2

    module = load(swapped, [torch.ones(3, requires_grad=True) for _ in range(3)], target)
    for used in range(3):
        found = []
        for call in (module, swapped):
            tensors = [torch.ones(3, requires_grad=True) for _ in range(3)]
            found.append(torch.autograd.grad(call(*tensors)[used].sum(), tensors, allow_unused=True))
        assert [None if g is None else g.tolist() for g in found[0]] == [
            None if g is None else g.tolist() for g in found[1]
        ]


class LooksAtGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if float(grad.sum()) > 0 else grad


def test_backward_that_no_graph_holds_is_refused_by_the_name_of_its_function(tmp_path):
    model = nn.Linear(3, 3)
    model.forward = lambda x: LooksAtGradients.apply(x @ model.weight)
    with pytest.raises(aotexport.ExportFailed, match="the backward of the custom autograd function `LooksAtGradients`"):
        aotexport.export(model, (torch.ones(2, 3),), output=tmp_path / "bundle", verify=False)
    aotexport.export(model, (torch.ones(2, 3),), output=tmp_path / "bundle", programs=("infer",))


class Endless(torch.autograd.Function):
    """Its backward applies itself."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return Endless.apply(grad, y), Endless.apply(grad, x)


def test_derivative_beyond_what_was_traced_is_refused(load):
    module = load(Endless.apply, (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)), "autograd")
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    value = module(x, y)
    for _ in range(2):
        (value,) = torch.autograd.grad((value**2).sum(), x, create_graph=True)
    with pytest.raises(aotexport_runtime.NotSupported, match="of too high an order"):
        torch.autograd.grad((value**2).sum(), x, create_graph=True)
