"""What a caller does between a call and its backward passes, compared with eager: on which tensors backward relies."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import aotexport
import aotexport_runtime
from tests.refusals import refusal


class Scaled(nn.Module):
    """Reads a buffer for a part of autograd's graph that no output needs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[2.0, 1.0], [0.5, 3.0]]))
        self.register_buffer("estimate", torch.ones(2))

    def forward(self, x):
        scale = (self.weight @ self.estimate).sum().detach()
        return x @ (self.weight / scale), (x * 2).sum(0)


def _sums(x, y):
    return x + y.view_as(x), (x - y).sum(0)


def _force(x, y):
    return torch.autograd.grad((x * y).sum(), [x, y], create_graph=True)


def _arguments():
    torch.manual_seed(0)
    return [torch.randn(2, 2, requires_grad=True) for _ in range(2)]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("backward_passes")
    x, y = _arguments()
    rows = Dim("rows", max=8)
    aotexport.export(Scaled(), (x,), output=root / "scaled", verify=False, dynamic_shapes=({0: rows},))
    aotexport.export(_sums, (x, y), output=root / "sums", verify=False, dynamic_shapes=({0: rows}, {0: rows}))
    aotexport.export(_force, (x, y), output=root / "force", verify=False)
    return root


TARGETS = pytest.mark.parametrize("target", ["portable", "autograd"])


@TARGETS
@pytest.mark.parametrize("changed", ["weight", "estimate", "x"])
def test_change_between_forward_and_backward_raises_where_eager_does(bundles, target, changed):
    def gradients(module):
        (x, _) = _arguments()
        loss = module(x)[0].sum()
        with torch.no_grad():
            {**dict(module.named_parameters()), **dict(module.named_buffers()), "x": x}[changed].mul_(2)
        try:
            loss.backward()
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                return []
            raise
        return [x.grad, module.weight.grad]

    loaded = aotexport_runtime.load(bundles / "scaled", target=target)
    expected = gradients(Scaled())
    assert len(expected) == (0 if changed == "x" else 2)
    torch.testing.assert_close(gradients(loaded.train()), expected)


@TARGETS
def test_backward_relies_on_nothing_where_eager_needs_sizes_alone(bundles, target):
    def outcome(function):
        x, y = _arguments()
        loss = sum(result.sum() for result in function(x, y))
        with torch.no_grad():
            x.mul_(2)
        loss.backward()
        loss.backward()
        return [x.grad, y.grad]

    loaded = aotexport_runtime.load(bundles / "sums", target=target)
    torch.testing.assert_close(outcome(loaded), outcome(_sums))


class _AddsAGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(2, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: ((x * y).sin(), _AddsAGradient.apply(x)),
        lambda x, y: (x * y, torch.logcumsumexp(x, 1), x.softmax(0)),
        lambda x, y: (x.split(1)[0], x.index_select(0, torch.tensor([1])), torch.where(y > 0, x, 0.0), y.cumsum(0)),
    ],
    ids=["function", "logarithms", "parts"],
)
def test_pass_from_one_output_gives_what_belongs_to_it(new_bundle, function):
    def passes(called):
        for output in range(len(function(*_arguments()))):
            arguments = _arguments()
            called(*arguments)[output].sum().backward()
            yield [argument.grad for argument in arguments]

    loaded = aotexport_runtime.load(new_bundle(function, *_arguments()), target="portable")
    for found, expected in zip(passes(loaded), passes(function), strict=True):
        assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
        torch.testing.assert_close(found, expected)


def test_passes_from_one_output_after_the_other_are_served_by_the_nodes_or_with_the_graph_kept(new_bundle):
    def apart(x, y):
        return x.sin(), y.exp()

    bundle = new_bundle(apart, *_arguments())
    nodes, joint = (aotexport_runtime.load(bundle, target=target) for target in ("autograd", "portable"))
    for function, keeps in ((apart, False), (nodes, False), (joint, True)):
        x, y = _arguments()
        first, second = function(x, y)
        first.sum().backward(retain_graph=keeps)
        second.sum().backward()
        assert torch.equal(x.grad, x.cos())
        assert torch.equal(y.grad, y.exp())
    first, second = joint(*_arguments())
    first.sum().backward()
    assert refusal(aotexport_runtime.NotSupported, second.sum().backward) == (
        "a backward pass from other outputs of this call has freed what the joint graph saved for all of them. "
        "Pass `retain_graph=True` to it, add the losses, or load the bundle with target='autograd'"
    )
    with pytest.raises(RuntimeError, match="second time"):
        first.sum().backward()


@TARGETS
def test_one_tensor_for_two_that_the_model_takes_gradients_of_is_refused(bundles, target):
    x, y = _arguments()
    force = aotexport_runtime.load(bundles / "force", target=target)
    torch.testing.assert_close([*force(x, y)], [*_force(x, y)])
    with pytest.raises(aotexport_runtime.CallInvalid, match="`y`: expected another tensor than `x`, as at capture"):
        force(x, x)


@TARGETS
def test_model_that_takes_gradients_is_refused_without_them(bundles, target):
    force = aotexport_runtime.load(bundles / "force", target=target)
    with torch.no_grad(), pytest.raises(aotexport_runtime.CallInvalid, match="is_grad_enabled"):
        force(*_arguments())


@TARGETS
def test_model_that_takes_gradients_is_refused_in_inference_mode(load, target):
    def slope(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.sin().sum(), x)[0]

    module, x = load(slope, torch.ones(3), target=target), torch.arange(3.0)
    with torch.no_grad():
        assert torch.equal(module(x), x.cos())
    with (
        torch.inference_mode(),
        pytest.raises(aotexport_runtime.CallInvalid, match=r"torch\.inference_mode\(\) records"),
    ):
        module(x)
