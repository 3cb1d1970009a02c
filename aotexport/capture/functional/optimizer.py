"""One optimizer's update of one parameter as a graph, traced from torch.optim's own step."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotexport.errors import AttemptFailed, ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.step import Step
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.calls import FakeTensorMode
from aotexport.torch_internals.patches import exporting
from aotexport.torch_internals.tracing import make_fx

aten = torch.ops.aten
_COUNT = "step"
"""Name in the state of optimizers of the number of steps, which a program has once for all parameters."""


@dataclass(frozen=True)
class Moments:
    """State of the optimizer for a parameter.

    Attributes:
        initial: the number that each tensor begins as, by name.
        forms: shape and dtype of each.
        counts: class of what counts steps in the optimizer's own state; None: nothing does.
    """

    initial: Mapping[str, float]
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    counts: type | None

    def made(self, parameter: torch.Tensor, value: Callable[[str], float]) -> dict[str, torch.Tensor]:
        """Return new tensors, filled with numbers by name; those of the parameter's shape have its strides."""
        return {
            name: torch.full_like(parameter, value(name), dtype=dtype)
            if shape == parameter.shape
            else torch.full(shape, value(name), dtype=dtype, device=parameter.device)
            for name, (shape, dtype) in self.forms.items()
        }

    def given(self, values: Mapping[str, Any], count: Any) -> dict[str, Any]:
        """Return state as an optimizer has it, by values and number of steps."""
        if self.counts is None:
            return {**values}
        return {**values, _COUNT: count if issubclass(self.counts, torch.Tensor) else self.counts(count)}


class _TensorsAsNumbers(TorchFunctionMode):
    """Let tensors be the numbers that `item` gives and that scale an operand: `alpha`, `value`, weights of `lerp`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.item:
            return args[0].to(torch.float64)
        if func in (torch.Tensor.lerp_, torch.Tensor.lerp, torch.lerp) and isinstance(args[-1], torch.Tensor):
            args = (*args[:-1], args[-1].to(args[0].dtype))
        for name, place in (("alpha", 1), ("value", 1)):
            if isinstance(kwargs.get(name), torch.Tensor):
                args = (*args[:place], args[place] * kwargs.pop(name), *args[place + 1 :])
        return func(*args, **kwargs)


class _Math:
    """The module `math`, of tensors too."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(math, name)
        if not callable(own):
            return own
        return lambda *args: (getattr(torch, name) if _has_tensors(args) else own)(*args)


def _has_tensors(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) for arg in args)


def _extreme(name: str, of_two: Callable[..., Any]) -> Callable[..., Any]:
    """Return `min` or `max`, of tensors too."""

    def extreme(*args: Any, **kwargs: Any) -> Any:
        if not _has_tensors(args):
            return getattr(builtins, name)(*args, **kwargs)
        found = [each if _has_tensors([each]) else torch.full((), each, dtype=torch.float64) for each in args]
        return functools.reduce(of_two, found)

    return extreme


@contextlib.contextmanager
def _numbers(names: dict[str, Any]) -> Iterator[None]:
    """Let an optimizer's code, by the names of its module, compute with tensors as with numbers."""
    why = "Follow numbers of optimizers, which are tensors in a program"
    own = {"min": _extreme("min", torch.minimum), "max": _extreme("max", torch.maximum), "math": _Math()}
    own = {name: each for name, each in own.items() if name != "math" or names.get(name) is math}
    with patched(*(Patch(names, name, each, why) for name, each in own.items())), _TensorsAsNumbers():
        yield


class _Created(TorchFunctionMode):
    """Note the values of tensors as functions first return them."""

    def __init__(self) -> None:
        super().__init__()
        self._found = dict[int, tuple[torch.Tensor, torch.Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if isinstance(value, torch.Tensor):
            self._found.setdefault(id(value), (value, value.detach().clone()))
        return value

    def number(self, tensor: torch.Tensor) -> float:
        """Return the number that a tensor began as everywhere; 0: it did not."""
        first = self._found.get(id(tensor), (tensor, tensor.new_zeros(1)))[1].flatten()
        return float(first[0]) if bool((first == first[0]).all()) else 0.0


def moments_of(step: Step, options: Mapping[str, Any], parameter: torch.Tensor) -> Moments:
    """Return the state that the optimizer keeps for a parameter; `ExportFailed`: it keeps other than such."""
    # A small parameter of other sizes along each axis, which tell the axes of the state.
    sizes = {1: 1} | {axis + 2: size for axis, size in enumerate(parameter.shape)}
    small = [1 if size == 1 else axis + 2 for axis, size in enumerate(parameter.shape)]
    values = torch.linspace(-1.0, 1.0, math.prod(small), dtype=parameter.dtype).reshape(small)
    with attempt(f"update by {step.name}"), _Created() as created:
        optimizer = step.made([values], options)
        before = step.options_shown(options)
        _stepped(optimizer, values)
        state = {name: value for name, value in optimizer.state[values].items() if value is not None}
    counts = type(state.pop(_COUNT)) if _COUNT in state else None
    initial = {name: created.number(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    changes = [name for name in before if step.shown(optimizer)[name] != before[name]]
    if changes := [*changes, *(state.keys() - initial)]:
        raise ExportFailed(f"step: {step.name} counts by `{changes[0]}`, and a program has state in tensors alone")
    try:
        forms = {name: (tuple(sizes[size] for size in state[name].shape), state[name].dtype) for name in initial}
    except KeyError:
        raise ExportFailed(f"step: {step.name} keeps state of other sizes than those of parameters") from None
    # A first gradient of one element is a number everywhere too.
    for numbers in (initial, dict.fromkeys(initial, 0.0)):
        found = Moments(numbers, forms, counts)
        with attempt(f"update by {step.name}"):
            if _begins_so(step, options, found, values, state):
                return found
    raise ExportFailed(f"step: {step.name} has state that does not begin as one number, whatever the rate")


def _begins_so(
    step: Step, options: Mapping[str, Any], moments: Moments, values: torch.Tensor, like: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether steps of new optimizers, which are given state, are those of one with its own, at any rate."""
    options = {**options, "lr": 3 * step.options_shown(options)["lr"]}
    own, other = values.clone(), values.clone()
    carried = {name: torch.full_like(like[name], number) for name, number in moments.initial.items()}
    optimizer = step.made([own], options)
    for count in range(2):
        _stepped(optimizer, own)
        again = step.made([other], options)
        again.state[other] = moments.given(carried, torch.tensor(float(count)))
        _stepped(again, other)
    return all(torch.allclose(optimizer.state[own][name], carried[name]) for name in carried) and own.allclose(other)


def _stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    parameter.grad = parameter.cos()
    optimizer.step()


def update_graph(
    step: Step, options: Mapping[str, Any], moments: Moments, parameter: torch.Tensor
) -> torch.fx.GraphModule:
    """Return the update of a parameter as a graph that writes in place.

    It takes the learning rate, the number of steps before it, the factor of clipping, the parameter, its gradient, and
    its `moments`. Every number is computed of the first three alone. `ExportFailed`: the optimizer's code reads values.
    """

    def update(lr: Any, count: Any, factor: Any, parameter: Any, grad: Any, *values: Any) -> None:
        optimizer = step.made([parameter], options, capturable=True)
        optimizer.param_groups[0]["lr"] = lr
        # The product of a gradient of rank 0 has the factor's dtype.
        parameter.grad = (grad * factor).to(grad.dtype) if step.clip else grad
        state = dict(zip(moments.forms, values, strict=True))
        optimizer.state[parameter] = {**state, _COUNT: count.clone()}
        own: Any = inspect.unwrap(step.kind.step)
        with torch.no_grad(), _numbers(own.__globals__):
            own(optimizer)

    try:
        with FakeTensorMode(), exporting(), attempt(f"update by {step.name}"):
            numbers = [torch.zeros((), dtype=torch.float64, device=parameter.device) for _ in range(3)]
            like = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
            own = moments.made(like, lambda _: 0.0)
            graph = make_fx(update)(*numbers, like, like.clone(), *own.values())
    except AttemptFailed as error:
        raise ExportFailed(f"step: {step.name} cannot be followed, as where it branches on values: {error}") from error
    count = graph.graph.find_nodes(op="placeholder")[1]
    for copied in [*count.users]:
        for node in [*copied.users]:
            if node.target is aten.add_.Tensor:
                # The copy is new: without it, all updates compute the same number.
                node.target, node.args = aten.add.Tensor, (count, node.args[1])
    return graph


def clip_graph(grads: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return the factor that clips gradients to a norm as a graph of that norm and of them.

    Source: torch 2.13, `nn/utils/clip_grad.py`, `clip_grad_norm_`.
    """

    def factor(max_norm: Any, *grads: Any) -> Any:
        norm = torch.nn.utils.get_total_norm(grads, foreach=False)
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    with FakeTensorMode():
        number = torch.zeros((), dtype=torch.float64, device=grads[0].device)
        return make_fx(factor)(number, *(torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in grads))


def apply_eagerly(
    step: Step,
    options: Sequence[Mapping[str, Any]],
    moments: Sequence[Moments],
    parameters: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    state: Mapping[str, Any],
    group_of: Sequence[int],
) -> None:
    """Let torch.optim update parameters, and their state in place, as users do by default."""
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        parameter.grad = grad + state["grads"][index] if step.accumulate else grad.clone()
    if step.clip:
        torch.nn.utils.clip_grad_norm_(parameters, float(state["max_norm"]), foreach=False)
    for parameter, values, own, group in zip(parameters, state["state"], moments, group_of, strict=True):
        optimizer = step.made([parameter], {**options[group], "lr": float(state["lr"][group])})
        optimizer.state[parameter] = own.given(values, state["count"].clone())
        optimizer.step()
    for held in state.get("grads", ()):
        held.zero_()
    state["count"].add_(1)
