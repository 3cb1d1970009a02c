"""The fast path of a call: which calls it serves, and which it turns away."""

import copy

import pytest
import torch
from torch import nn

from aotexport_runtime import load

TURNED_AWAY = object()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x, bias=None):
        return self.linear(x) * self.scale if bias is None else self.linear(x) + bias


@pytest.fixture(scope="module", params=["static", "dynamic"])
def bundle(request, new_bundle):
    shapes = ({0: torch.export.Dim("rows", min=2, max=9)},) if request.param == "dynamic" else None
    return new_bundle(Scaled(), torch.randn(3, 4), dynamic_shapes=shapes)


def only_fast(module, program):
    plan = copy.copy(module._plan(program))
    plan._check_and_run = lambda args, kwargs: TURNED_AWAY
    return plan.fast_path()


def x(rows=3):
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4)


def test_calls_like_the_captured_one_are_served(bundle):
    module = load(bundle, target="portable")
    for call in (only_fast(module, "train"), torch.no_grad()(only_fast(module, "infer"))):
        expected = torch.nn.functional.linear(x(), module.linear.weight, module.linear.bias) * 2
        torch.testing.assert_close(call((x(),), {}), expected)
        torch.testing.assert_close(call((), {"x": x()}), expected)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"x": x(), "y": x()}),
        ((x(),), {"x": x()}),
        ((x(), x()), {}),
        ((None,), {}),
        ((x().double(),), {}),
        ((x().to_sparse(),), {}),
        ((x().to("meta"),), {}),
        ((x()[0],), {}),
        ((x(10),), {}),
        ((x(0),), {}),
        ((x()[:, :3],), {}),
        ((torch.zeros(4, 3).T,), {}),
        ((torch.zeros(3, 4, dtype=torch.complex64).conj().imag,), {}),
        ((x().requires_grad_(),), {}),
    ],
)
def test_calls_that_need_a_second_look_are_turned_away(bundle, args, kwargs):
    assert only_fast(load(bundle, target="portable"), "train")(args, kwargs) is TURNED_AWAY


def test_calls_that_no_joint_graph_serves_are_turned_away(bundle):
    module = load(bundle, target="portable")
    train, infer = only_fast(module, "train"), only_fast(module, "infer")
    assert infer((x(),), {}) is TURNED_AWAY
    with torch.no_grad():
        assert train((x(),), {}) is TURNED_AWAY
    with torch.autocast("cpu"):
        assert train((x(),), {}) is TURNED_AWAY
    assert torch.func.vmap(lambda _: torch.tensor(train((x(),), {}) is TURNED_AWAY))(torch.zeros(2)).all()
    module.requires_grad_(False)
    assert train((x(),), {}) is TURNED_AWAY
    module.linear.weight.requires_grad_()
    assert train((x(),), {}) is not TURNED_AWAY


def test_state_that_is_gone_or_laid_out_otherwise_is_turned_away(bundle):
    module = load(bundle, target="portable")
    train = only_fast(module, "train")
    module.linear.weight = nn.Parameter(module.linear.weight.detach().T.contiguous().T)
    assert train((x(),), {}) is TURNED_AWAY
    del module.linear.weight
    assert train((x(),), {}) is TURNED_AWAY


def test_gradients_reach_tensors_that_transforms_left_behind(new_bundle):
    module, given = load(new_bundle(Scaled(), x().requires_grad_()), target="portable").train(), x().requires_grad_()
    left: list[torch.Tensor] = []
    torch.func.grad(lambda inside: [left.append(inside), inside.sum()][1])(given)
    module(left[0]).sum().backward()
    torch.testing.assert_close(given.grad, (2 * module.linear.weight.sum(0)).expand(3, 4))
