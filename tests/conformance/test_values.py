"""Programs captured along the example's path: other values on that path are right, another path is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aotexport
import aotexport_runtime
from tests.refusals import refusal

TARGETS = ["portable", "autograd"]
PATH = (
    "the values of this call lead another way through the code than those of the example call, along which the "
    "program was captured; export with an example of this kind, or choose with torch.where or torch.cond. It needs "
)


def line(function, offset):
    file = Path(__file__).relative_to(Path.cwd())
    return f"{file}:{function.__code__.co_firstlineno + offset} in {function.__name__}: "


def by_sign(x):
    if x.sum() > 0:
        return x * 2
    return x - 1


def repeated(x, n):
    for _ in range(n.item()):
        x = x * 2
    return x


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("function", "example", "call", "offset", "needed"),
    [
        (by_sign, [torch.ones(2)], [-torch.ones(2)], 1, "a condition to be True. The call has False"),
        (
            repeated,
            [torch.ones(2), torch.tensor(3)],
            [torch.ones(2), torch.tensor(4)],
            1,
            "`value` to be 3, with 3 in the example call. The call has 4",
        ),
    ],
)
def test_call_on_another_path_is_refused(bundle_of, target, function, example, call, offset, needed):
    module = aotexport_runtime.load(bundle_of(function, *example), target=target)
    assert refusal(aotexport_runtime.CheckFailed, module, *call) == line(function, offset) + PATH + needed


def test_refused_call_of_the_functional_graph_changes_nothing(load):
    def counted(x, total):
        total.add_(1)
        return by_sign(x) + total

    module = load(counted, torch.ones(2), torch.zeros(2))
    total = torch.zeros(2)
    with pytest.raises(aotexport_runtime.CheckFailed):
        module(-torch.ones(2), total)
    assert torch.equal(total, torch.zeros(2))


def test_float_taken_from_values_is_refused_with_the_line(load):
    def halved(x):
        return x * float(x.max()) if x.sum() > 0 else x

    with pytest.raises(aotexport.ExportFailed) as caught:
        load(halved, torch.tensor([1.0, 2.5]))
    where = f"{__file__}:{halved.__code__.co_firstlineno + 1}: in halved: "
    assert str(caught.value) == (
        f"{where}the model turns the value of a tensor into a Python float (2.5 in the example call), and the program "
        "would hold for calls with that very value alone. Keep it a tensor, or use what `Tensor.item()` returns in "
        "tensor operators alone"
    )


def test_whole_float_taken_from_values_is_checked(load):
    def scaled(x):
        return x * 2 ** float(x.max().log2().round()) if x.sum() > 0 else x

    module = load(scaled, torch.tensor([1.0, 4.0]))
    near = torch.tensor([0.5, 4.5])
    assert torch.equal(module(near), scaled(near))
    said = refusal(aotexport_runtime.CheckFailed, module, torch.tensor([0.5, 9.0]))
    assert said == f"{line(scaled, 1)}{PATH}`value` to be 2, with 2 in the example call. The call has 3.0"


def test_path_that_changes_when_the_example_is_called_again_is_refused(load):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls.add_(1)
            return x if self.calls == 1 else -x

    assert refusal(aotexport.ExportFailed, load, First(), torch.ones(2)) == (
        "the example call, made 2 times with the same inputs, takes different paths through the code. "
        f"{line(First.forward, 2)}{PATH}a condition to be True. The call has False"
    )


def test_recorded_calls_are_those_on_the_path(tmp_path):
    def only_two(x):
        return x * 2 if x[0] == 2 else x

    report = aotexport.export(only_two, (torch.tensor([2.0, 1.0, 3.0]),), output=tmp_path / "bundle")
    assert [entry.name for entry in report.manifest.testvectors] == ["example"]
    assert all(comparison.agrees for comparison in report.comparisons)


def test_gradient_of_a_data_dependent_output_in_another_layout_equals_eager(load):
    def chosen(x):
        rows = x[x.sum(1) > 0]
        return (rows * rows).t(), rows.shape[0]

    x = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [2.0, 2.0]], requires_grad=True)
    module = load(chosen, x)
    assert module.bundle.program("train").refusals == ()
    tangent = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = torch.autograd.grad(chosen(x)[0], x, tangent)
    for given in (tangent, tangent.t().contiguous().t()):
        assert torch.equal(*torch.autograd.grad(module(x)[0], x, given), *expected)
    other = torch.ones(3, 2, requires_grad=True)
    assert torch.equal(
        *torch.autograd.grad(module(other)[0].sum(), other), *torch.autograd.grad(chosen(other)[0].sum(), other)
    )


class Chosen(torch.autograd.Function):
    """Branches on values in forward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w if x.sum() > 0 else x - w

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        return grad * 3, (grad * x).sum(0)


class Clipping(Chosen):
    """Branches in backward on the gradient that comes in."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if grad.abs().max() > 0.5:
            grad = grad / 2
        return grad * w, (grad * x).sum(0)


class Applying(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.before, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return self.function.apply(x * self.before, self.scale)


def gradients(model, x, factor=1.0):
    """Return the output, and the gradients of the parameters by a multiple of its sum."""
    model.zero_grad()
    output = model(x)
    (output.sum() * factor).backward()
    return [output, *[parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize(
    ("function", "other", "asks"),
    [(Chosen, {"x": -torch.ones(4, 3)}, Chosen.forward), (Clipping, {"factor": 0.25}, Clipping.backward)],
)
def test_custom_function_that_branches_on_values_goes_the_way_of_the_example(load, function, other, asks):
    model, x = Applying(function), torch.rand(4, 3)
    loaded = load(model, x, dynamic_shapes=({0: Dim("batch", min=1, max=9)},), programs=("train",), target="auto")
    for call in ({"x": x}, {"x": torch.rand(7, 3), "factor": 0.75}):
        expected, found = gradients(model, **call), gradients(loaded, **call)
        assert [each is None for each in found] == [each is None for each in expected]
        for one, same in zip(found, expected, strict=True):
            torch.testing.assert_close(one, same)
    said = refusal(aotexport_runtime.CheckFailed, gradients, loaded, **{"x": x, **other})
    assert said == line(asks, 3) + PATH + "a condition to be True. The call has False"
