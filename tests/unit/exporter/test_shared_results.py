"""Results on fake tensors that one trace takes from another: those that hold for it, and no others."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor  # noqa: TID251
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: TID251

import aotexport
from aotexport.torch_internals.cached_fakes import made_quickly
from aotexport.torch_internals.shared_results import SharedResults, results_shared


def world(*equal, least=2):
    """Return a fake mode, a fake tensor of its two sizes, and the results of the mode."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    x = mode.from_tensor(torch.zeros(6, 8), symbolic_context=context)
    mode.shape_env.constrain_symbol_range(x.shape[0].node.expr, least, 64)
    for other in equal:
        torch._check(mode.from_tensor(torch.zeros(other), symbolic_context=dynamic()).shape[0] == x.shape[0])
    return mode, x, SharedResults(mode.shape_env)


def dynamic():
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])


@pytest.fixture
def computed(monkeypatch):
    """Operators whose fake results are computed."""
    found = []
    compute = FakeTensorMode._dispatch_impl

    def dispatch(self, func, *args):
        found.append(str(func))
        return compute(self, func, *args)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", dispatch)
    return found


def test_trace_with_the_same_sizes_takes_results(computed):
    with results_shared():
        mode, x, _ = world()
        with made_quickly(mode.shape_env), mode:
            first = (x * 2).t().sum(0)
        assert computed
        computed.clear()
        mode, x, _ = world()
        with made_quickly(mode.shape_env), mode:
            second = (x * 2).t().sum(0)
    assert not computed
    assert (str(first.shape), first.dtype) == (str(second.shape), second.dtype)
    assert second.shape[0].node.shape_env is mode.shape_env


@pytest.mark.parametrize("other", [{"least": 3}, {"equal": (6,)}], ids=["range", "equation"])
def test_trace_that_knows_less_or_something_else_takes_none(other, computed):
    with results_shared():
        mode, x, _ = world(*other.get("equal", ()), least=other.get("least", 2))
        # The equation may replace either symbol.
        replaced = x.shape[0].node._expr in mode.shape_env.replacements
        with mode:
            x * 2
        computed.clear()
        mode, x, _ = world()
        with mode:
            x * 2
    assert bool(computed) is ("least" in other or replaced)


def test_trace_under_autocast_takes_none(computed):
    with results_shared():
        mode, x, _ = world()
        with mode:
            x * 2
        computed.clear()
        with torch.autocast("cpu"):
            mode, x, _ = world()
            with mode:
                x * 2
    assert computed


def test_results_of_one_export_are_not_those_of_another(computed):
    for _ in range(2):
        computed.clear()
        with results_shared():
            mode, x, _ = world()
            with mode:
                x * 2
        assert computed


def test_result_that_a_guard_or_an_assumption_made_is_for_its_trace_alone(computed):
    with results_shared():
        mode, x, _ = world()
        with mode:
            x.cos()
            assert x.shape[0] > 4
            x.sin()
        computed.clear()
        mode, x, _ = world()
        with mode:
            x.cos()
            assert not computed
            x.sin()
            assert computed


def test_result_computed_with_an_assumption_is_for_its_trace_alone(computed, monkeypatch):
    compute = FakeTensorMode._dispatch_impl
    mode, x, results = None, None, None

    def assuming(self, func, *args):
        results.assumptions += 1
        return compute(self, func, *args)

    with results_shared():
        mode, x, results = world()
        with monkeypatch.context() as patch, mode:
            patch.setattr(FakeTensorMode, "_dispatch_impl", assuming)
            x.cos()
        computed.clear()
        mode, x, results = world()
        with mode:
            x.cos()
    assert computed


def test_result_computed_from_one_with_an_assumption_is_for_its_trace_alone(computed, monkeypatch):
    compute = FakeTensorMode._dispatch_impl
    mode, x, results = None, None, None

    def assuming(self, func, *args):
        results.assumptions += func is torch.ops.aten.cos.default
        # The fake kernel of `sin` uses `cos`, as those of many operators use others.
        return (
            self.dispatch(torch.ops.aten.cos.default, *args)
            if func is torch.ops.aten.sin.default
            else compute(self, func, *args)
        )

    with results_shared():
        mode, x, results = world()
        with monkeypatch.context() as patch, mode:
            patch.setattr(FakeTensorMode, "_dispatch_impl", assuming)
            x.cos()
            x.sin()
        computed.clear()
        mode, x, results = world()
        with mode:
            x.sin()
    assert "aten.sin.default" in computed


@pytest.mark.parametrize(
    ("name", "operator", "shared"),
    [
        ("relu", lambda x: x.relu(), True),
        ("convolution", lambda x: nn.functional.conv1d(x[None], torch.zeros(6, 6, 1)), False),
    ],
)
def test_operands_that_require_grad_are_told_apart_where_an_operator_looks(name, operator, shared, computed):
    mode, x, _ = world()
    with made_quickly(mode.shape_env), mode:
        operator(x)
        y = x.detach().requires_grad_()
        computed.clear()
        assert operator(y).requires_grad
        assert any(name in each for each in computed) is not shared
        assert not operator(x).requires_grad


def test_result_that_requires_grad_is_not_kept_for_operands_that_do_not():
    mode, x, _ = world()
    with made_quickly(mode.shape_env):
        keep = functools.partial(mode._validate_output_for_cache_entry, None, None, torch.ops.aten.relu.default, (), {})
        with pytest.raises(fake_tensor._BypassDispatchCache):
            keep(x.detach().requires_grad_())


class Convolving(nn.Module):
    """Torch assumes a batch size for the kernel of its convolution: the assumption is of each program's own."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.convolution(x).relu().mean((2, 3)))


def test_each_program_keeps_its_own_assumptions(monkeypatch, tmp_path):
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}

    def graphs(folder):
        report = aotexport.export(Convolving(), (torch.randn(4, 3, 8, 8),), dynamic_shapes=sizes, output=folder)
        return [(program.record, program.graphs) for program in report.programs]

    torch.manual_seed(0)
    shared = graphs(tmp_path / "shared")
    monkeypatch.setattr(SharedResults, "get", dict.get)
    torch.manual_seed(0)
    assert graphs(tmp_path / "alone") == shared
    assert any(record.functional.guards for record, _ in shared)
