"""Guards: the fast path and the explaining path of a call agree on which calls a program serves.

Calls are made from those that the program was captured with, by changes that a caller may make.
"""

import contextlib
import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from aotexport_runtime import NotSupported, load
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.call.plan import Plan
from aotexport_runtime.guards.rule import Row
from aotexport_runtime.module.compose import compose
from aotexport_runtime.schema.program import ArgumentInput, SizeInput, StateInput
from aotexport_runtime.values import sizes
from aotexport_runtime.values.dtypes import dtype
from aotexport_runtime.values.trees import builder
from tests.property.profile import quick

GOLDEN = Path(__file__).parents[1] / "golden" / "v1.0"
PROGRAMS = [
    (name, program, target)
    for name in (
        "linear",
        "tied_weights",
        "dynamic_sizes",
        "dynamic_integer",
        "size_arithmetic",
        "input_data_mutated",
        "input_metadata_mutated",
        "strided_view_of_input",
        "python_that_reads_tensors",
        "gradients_taken_inside",
        "captured_under_autocast",
    )
    for program in open_bundle(GOLDEN / name / "bundle").program_names
    for target in ("portable", "autograd")
]
TURNED_AWAY = object()
some = settings(quick, max_examples=60, suppress_health_check=list(HealthCheck))
many = settings(some, max_examples=10_000 // len(PROGRAMS) + 1)


class Own(torch.Tensor):
    """A subclass that wraps nothing."""


def _looked_like(meta: Any, symbols: dict[str, int]) -> torch.Tensor:
    """Return a tensor as it was at capture."""
    shape = [sizes.evaluate(size, symbols) for size in meta.shape]
    stride = [sizes.evaluate(step, symbols) for step in meta.stride]
    tensor = torch.zeros(512).to(dtype(meta.dtype)).as_strided(shape, stride, sizes.evaluate(meta.offset, symbols))
    return tensor.requires_grad_(meta.requires_grad)


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_sparse()


CHANGES = {
    "dtype": lambda t: t.detach().to(torch.float64 if t.dtype is not torch.float64 else torch.int64),
    "device": lambda t: t.detach().to("meta"),
    "sparse": _sparse,
    "longer": lambda t: torch.cat([t, t]).detach() if t.dim() else t[None],
    "shorter": lambda t: t.detach()[:-1].clone() if t.dim() else t.detach()[None],
    "empty": lambda t: t.detach()[:0],
    "another axis": lambda t: t.detach()[None],
    "an axis less": lambda t: t.detach()[0] if t.dim() and len(t) else t,
    "strides": lambda t: (
        torch.empty(t.T.shape, dtype=t.dtype).T if t.dim() == 2 else torch.zeros(99, dtype=t.dtype)[::9]
    ),
    "contiguous": lambda t: t.detach().contiguous().clone(),
    "offset": lambda t: torch.zeros(t.numel() + 3, dtype=t.dtype)[3:].reshape(t.shape),
    "requires_grad": lambda t: t.detach().clone().requires_grad_() if t.dtype.is_floating_point else t,
    "no grad": lambda t: t.detach(),
    "no leaf": lambda t: t.detach().clone().requires_grad_() * 1 if t.dtype.is_floating_point else t,
    "hooks": lambda t: _hooked(t),
    "negated": lambda t: torch.zeros(t.shape, dtype=torch.complex64).conj().imag,
    "parameter": lambda t: nn.Parameter(t.detach().clone(), t.dtype.is_floating_point),
    "subclass": lambda t: t.detach().as_subclass(Own),
    "array": lambda t: t.detach().numpy(),
    "none": lambda t: None,
    "number": lambda t: 2.5,
    "list": lambda t: [t],
}


def _hooked(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach().clone()
    if leaf.dtype.is_floating_point:
        leaf.requires_grad_().register_hook(lambda gradient: gradient)
    return leaf


MODES = {
    "grad": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


STATE = {
    "strides": lambda t: nn.Parameter(torch.empty(t.shape[::-1]).T) if t.dim() == 2 else None,
    "gone": lambda t: None,
    "frozen": lambda t: t.detach(),
    "another": lambda t: nn.Parameter(t.detach().clone()),
    "hooks": _hooked,
}


class Paths:
    """The paths of a program's calls: that which explains, and what is generated."""

    def __init__(self, name: str, program: str, target: str) -> None:
        module = load(GOLDEN / name / "bundle", target=target)
        self.usual = compose(module, module.bundle.program(program))
        self.fast = self._function(self.usual.quick_rows)
        self.complete = self._function([*map(_complete, self.usual.quick_rows)])
        self.program = self.usual.program
        self.slots = {
            index: module._slot(spec.name)
            for index, spec in enumerate(self.program.inputs)
            if isinstance(spec, StateInput)
        }
        self.trees = [builder(parameter.tree, lambda leaf: leaf.value) for parameter in self.program.parameters]

    def _function(self, rows: list[Row]) -> Any:
        engine = SimpleNamespace(
            expression=lambda source: None, held_expression=lambda source: None, run=lambda *served: served
        )
        plan = copy.copy(self.usual)
        plan.quick_rows, plan.engines, plan._rebinds = rows, [engine], ()
        plan._unflatten, plan._check_and_run = lambda served: served, _turned_away
        return plan.fast_path()

    def inputs(self, size: int) -> list[Any]:
        """Return inputs of a call like the captured one."""
        symbols = {dimension.symbol: size for dimension in self.program.dimensions}
        found: list[Any] = []
        for index, spec in enumerate(self.program.inputs):
            if isinstance(spec, SizeInput):
                found.append(symbols[spec.symbol])
            elif isinstance(spec, ArgumentInput):
                found.append(_looked_like(spec.meta, symbols))
            else:
                table, key = self.slots[index]
                found.append(table.get(key))
        return found


def _complete(row: Row) -> Row:
    """Return a row whose quick form turns away no call that it holds for."""
    return row._replace(quick=None) if row.stricter else row


def _explained(plan: Plan, args: Any, kwargs: Any) -> Any:
    """Return why a plan refuses a call, or its inputs and why the first engine does not serve it."""
    try:
        call = plan.bind(args, kwargs)
    except NotSupported as error:
        return str(error)
    if call.violations:
        return call.violations
    return call.inputs, call.symbols, plan.engines[0].why_not(call.inputs, call.symbols)


paths = cache(Paths)


@pytest.mark.parametrize(("name", "program", "target"), PROGRAMS)
@some
@given(st.data())
def test_paths_of_a_call_agree(name, program, target, data):
    _agree(paths(name, program, target), data)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "program", "target"), PROGRAMS)
@many
@given(st.data())
def test_paths_of_many_calls_agree(name, program, target, data):
    _agree(paths(name, program, target), data)


def _agree(known: Paths, data: st.DataObject) -> None:
    inputs = known.inputs(data.draw(st.integers(1, 9)))
    passed = [i for i, spec in enumerate(known.program.inputs) if isinstance(spec, ArgumentInput | SizeInput)]
    for index in data.draw(st.lists(st.sampled_from(passed), max_size=2, unique=True)):
        if isinstance(inputs[index], torch.Tensor):
            inputs[index] = CHANGES[data.draw(st.sampled_from([*CHANGES]))](inputs[index])
        else:
            inputs[index] = data.draw(st.sampled_from([7, 2.5, True, torch.ones(2)]))
    if data.draw(st.integers(0, 9)) == 0:
        source, copy = data.draw(st.sampled_from(passed)), data.draw(st.sampled_from(passed))
        alias = data.draw(st.booleans()) and isinstance(inputs[source], torch.Tensor)
        inputs[copy] = inputs[source].detach() if alias else inputs[source]
    args, kwargs = tuple(make(inputs) for make in known.trees), {}
    how = data.draw(st.sampled_from(["positional"] * 8 + ["keyword", "missing", "extra", "constant"]))
    if how == "keyword":
        kwargs = {known.program.parameters[-1].name: args[-1]}
    if how in ("keyword", "missing"):
        args = args[:-1]
    if how in ("extra", "constant"):
        args = (*args, 3) if how == "extra" else (*args[:-1], "other")
    with contextlib.ExitStack() as stack:
        if known.slots and data.draw(st.integers(0, 4)) == 0:
            table, key = data.draw(st.sampled_from([*known.slots.values()]))
            stack.callback(table.__setitem__, key, table[key])
            table[key] = STATE[data.draw(st.sampled_from([*STATE]))](table[key])
        stack.enter_context(MODES[data.draw(st.sampled_from(["grad"] * 4 + ["no grad"] * 3 + [*MODES]))]())
        expected = _explained(known.usual, args, kwargs)
        is_served = isinstance(expected, tuple) and expected[2] is None
        for function in (known.fast, known.complete):
            served = function(args, kwargs)
            assert served is TURNED_AWAY or (is_served and _same(served, expected[:2]))
        if is_served and how == "positional" and known.complete is not _turned_away:
            assert function(args, kwargs) is not TURNED_AWAY


def _turned_away(args: Any, kwargs: Any) -> Any:
    return TURNED_AWAY


def _same(a: Any, b: Any) -> bool:
    """Return whether two explanations are the same, with the very same inputs."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a[0]) == len(b[0]) and all(x is y for x, y in zip(a[0], b[0], strict=True)) and a[1:] == b[1:]
    return type(a) is type(b) and a == b
