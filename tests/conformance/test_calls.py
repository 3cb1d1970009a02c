"""Calls unlike the captured one: other gradients, modes, layouts and aliasing, compared with eager in this process."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import aotexport_runtime


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x, y):
        hidden = self.dropout(self.norm(self.first(x)).relu())
        return self.second(hidden), hidden * y, y + 1


def arguments(**grad):
    torch.manual_seed(1)
    return torch.randn(5, 4, requires_grad=grad.get("x", True)), torch.randn(5, 6, requires_grad=grad.get("y", True))


@pytest.fixture(scope="module")
def exported(new_bundle):
    torch.manual_seed(0)
    net = Net()
    return net, new_bundle(net, *arguments())


@pytest.fixture(params=["portable", "autograd"])
def pair(exported, request):
    """Return an eager twin and the loaded bundle, with the same weights."""
    net, path = exported
    return copy.deepcopy(net), aotexport_runtime.load(path, target=request.param)


def outcome(module, call):
    """Return what `call` gives on `module`, with the gradients and buffers afterwards."""
    torch.manual_seed(7)
    module.zero_grad()
    values = call(module)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return values, gradients, {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(pair, call):
    eager, loaded = pair
    for expected, got in zip(outcome(eager, call), outcome(loaded, call), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_inputs_in_another_layout_equal_eager(pair, layout):
    def call(module):
        x, y = arguments(x=False, y=False)
        if layout == "transposed":
            x = x.t().contiguous().t()
        elif layout == "strided":
            x = torch.stack([x, x], dim=-1)[..., 0]
        else:
            x = x[:1].expand(5, 4)
        outputs = module(x, y)
        outputs[0].sum().backward()
        return list(outputs)

    assert_same(pair, call)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "double"])
def test_tangents_in_another_layout_equal_eager(pair, layout):
    def call(module):
        x, y = arguments()
        output = module(x, y)[0]
        if layout == "expanded":
            output.sum().backward()
        elif layout == "transposed":
            output.backward(torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).t())
        else:
            output.double().sum().backward()
        return [x.grad, y.grad]

    assert_same(pair, call)


def test_hooks_on_parameters_inputs_and_the_module_are_called(pair):
    def call(module):
        seen = []
        x, y = arguments()
        handles = [
            x.register_hook(lambda grad: seen.append(grad.clone())),
            module.get_parameter("first.weight").register_hook(lambda grad: grad * 2),
            module.register_forward_hook(lambda module, args, output: (output[0] * 3, *output[1:])),
        ]
        module(x, y)[0].sum().backward()
        for handle in handles:
            handle.remove()
        return [x.grad, *seen]

    assert_same(pair, call)


def test_threads_call_one_module_at_once(exported):
    _, path = exported
    module = aotexport_runtime.load(path, target="portable").eval()
    x, y = arguments()
    expected = torch.autograd.grad(module(x, y)[0].sum(), x)[0]
    results = []

    def work():
        for _ in range(20):
            a, b = x.detach().clone().requires_grad_(), y.detach()
            results.append(torch.autograd.grad(module(a, b)[0].sum(), a)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)


def test_func_grad_and_vmap_equal_eager(pair):
    def call(module):
        module.eval()
        x, y = arguments(x=False, y=False)
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())

        def loss(parameters, x, y):
            return torch.func.functional_call(module, (parameters, buffers), (x, y))[0].square().sum()

        whole = torch.func.grad(loss)({name: value.detach() for name, value in parameters.items()}, x, y)
        return whole

    assert_same(pair, call)


THREE = torch.tensor(3)


def repeated(n):
    k = n.item()
    torch._check(k <= 4)
    return torch.ones(k).sum()


@pytest.mark.parametrize("target", ["portable", "autograd"])
def test_violated_check_of_a_data_dependent_number_raises(bundle_of, target):
    module = aotexport_runtime.load(bundle_of(repeated, THREE), target=target)
    assert module(torch.tensor(4)) == 4
    with pytest.raises(RuntimeError) as caught:
        module(torch.tensor(7))
    assert isinstance(caught.value, aotexport_runtime.CheckFailed)
    where = f"{Path(__file__).relative_to(Path.cwd())}:{repeated.__code__.co_firstlineno + 1} in repeated"
    needed = "the program needs `value <= 4` of a number that only the data know"
    assert str(caught.value) == f"{where}: {needed}. The call has 7"


def halves_of_positive_rows(x):
    rows = x[x[:, 0] > 0]
    left, right = rows.split(2, dim=1)
    return left * 2, right * 3, rows.sum()


ROWS = torch.eye(5, 4).requires_grad_()


@pytest.mark.parametrize("used", [(0,), (2,), (0, 1, 2)])
def test_backward_from_some_outputs_of_sizes_that_only_the_data_know_equals_eager(bundle_of, used):
    path = bundle_of(halves_of_positive_rows, ROWS)
    gradients = []
    for callable_ in (halves_of_positive_rows, aotexport_runtime.load(path, target="portable")):
        x = torch.linspace(-2, 3, 24).reshape(6, 4).sin()[:5].requires_grad_()
        outputs = callable_(x)
        sum(outputs[index].square().sum() for index in used).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
