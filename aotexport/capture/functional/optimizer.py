"""One optimizer's update of one parameter as a graph, traced from torch.optim's own step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotexport.model.refusals import attempt
from aotexport.model.step import Step
from aotexport.torch_internals.calls import FakeTensorMode
from aotexport.torch_internals.patches import exporting
from aotexport.torch_internals.tracing import make_fx

_COUNT = "step"
"""Name in the state of torch's optimizers of the number of steps, which a program has once for all parameters."""


@dataclass(frozen=True)
class Moments:
    """State of the optimizer for a parameter, by name: tensors like the parameter, and the number they begin as."""

    names: tuple[str, ...]
    initial: float


class _TensorsAsNumbers(TorchFunctionMode):
    """Let `alpha` and `value` of operators be tensors, as learning rates are: they scale an operand before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for name, place in (("alpha", 1), ("value", 1)):
            if isinstance(kwargs.get(name), torch.Tensor):
                args = (*args[:place], args[place] * kwargs.pop(name), *args[place + 1 :])
        return func(*args, **kwargs)


def moments_of(step: Step, options: Mapping[str, Any]) -> Moments:
    """Return the state that the optimizer keeps for a parameter, beside the number of steps."""
    parameter = torch.zeros(1)
    parameter.grad = torch.zeros(1)
    optimizer = step.made([parameter], options)
    before = dict(optimizer.state[parameter])
    optimizer.step()
    names = tuple(
        name for name, value in optimizer.state[parameter].items() if name != _COUNT and isinstance(value, torch.Tensor)
    )
    return Moments(names, next((float(before[name]) for name in names if name in before), 0.0))


def update_graph(
    step: Step, options: Mapping[str, Any], moments: Moments, parameter: torch.Tensor
) -> torch.fx.GraphModule:
    """Return the update of a parameter as a graph that writes in place.

    It takes the learning rate, the number of steps before it, the factor of clipping, the parameter, its gradient, and
    its `moments`. Every number is computed of the first three alone.
    """

    def update(lr: Any, count: Any, factor: Any, parameter: Any, grad: Any, *values: Any) -> None:
        state = dict(zip(moments.names, values, strict=True))
        optimizer = step.made([parameter], options, capturable=True)
        optimizer.param_groups[0]["lr"] = lr
        # The product of a gradient of rank 0 has the factor's dtype.
        parameter.grad = (grad * factor).to(grad.dtype) if step.clip else grad
        optimizer.state[parameter] = {**state, _COUNT: count.clone()}
        with torch.no_grad(), _TensorsAsNumbers():
            inspect.unwrap(step.kind.step)(optimizer)

    with FakeTensorMode(), exporting():
        number = torch.zeros((), dtype=torch.float64, device=parameter.device)
        like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
        with attempt(f"update by {step.optimizer}"):
            numbers = [number.clone() for _ in range(3)]
            graph = make_fx(update)(*numbers, *(like.clone() for _ in range(2 + len(moments.names))))
    count = graph.graph.find_nodes(op="placeholder")[1]
    for copied in [*count.users]:
        for node in [*copied.users]:
            if node.target is torch.ops.aten.add_.Tensor:
                # The copy is new: without it, all updates compute the same number.
                node.target, node.args = torch.ops.aten.add.Tensor, (count, node.args[1])
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
    groups: Sequence[tuple[Mapping[str, Any], Moments]],
    parameters: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    state: Mapping[str, Any],
    group_of: Sequence[int],
) -> None:
    """Let torch.optim update parameters, and their state in place, as users do by default."""
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    if step.clip:
        torch.nn.utils.clip_grad_norm_(parameters, float(state["max_norm"]), foreach=False)
    for parameter, values, group in zip(parameters, state["state"], group_of, strict=True):
        options = {**groups[group][0], "lr": float(state["lr"][group])}
        optimizer = step.made([parameter], options)
        optimizer.state[parameter] = {**values, _COUNT: state["count"].clone()}
        optimizer.step()
    state["count"].add_(1)
