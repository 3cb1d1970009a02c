"""Operators that are not plain tensor functions: changes of interpreter state, and higher-order operators.

Subgraphs are run as eager execution runs them, branch by branch and step by step, so that autograd sees through them.

Source: torch 2.13, `torch/_higher_order_ops/` (`cond_op_dense`, `while_loop_dense`, `generic_scan`, `map_dense`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.autocast import autocast_of_now
from aotexport_runtime.execution.autograd_function import AutogradFunction
from aotexport_runtime.execution.checkpoint import checkpoint

Step = Callable[..., tuple[Any, ...]]
"""A subgraph as a function of its operands."""

# --- interpreter state ------------------------------------------------------------------------------------


class _Open(threading.local):
    """Autocast regions that forward graphs of this thread have entered and not left."""

    def __init__(self) -> None:
        self.regions: list[torch.autocast] = []


_open = _Open()


@contextlib.contextmanager
def restored_on_error() -> Generator[None]:
    """Put grad mode and autocast back as they were if the block raises, as the model's own regions would."""
    grad, depth = torch.is_grad_enabled(), len(_open.regions)
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_grad_enabled, grad)
        undo.callback(_leave_autocast, depth)
        yield
        undo.pop_all()


class CallersGradMode:
    """The grad mode that a graph begins in, which the ends of its own regions restore."""

    def __init__(self) -> None:
        self._enabled = torch.is_grad_enabled()

    def restore(self) -> None:
        """Switch to this mode."""
        torch.set_grad_enabled(self._enabled)


def _set_grad_enabled(mode: bool | CallersGradMode) -> None:
    if isinstance(mode, CallersGradMode):
        mode.restore()
    else:
        torch.set_grad_enabled(mode)


def _enter_autocast(
    device: torch.device, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool
) -> torch.autocast:
    region = torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    region.__enter__()
    _open.regions.append(region)
    return region


def _exit_autocast(region: torch.autocast) -> None:
    _open.regions.remove(region)
    region.__exit__(None, None, None)


def _leave_autocast(depth: int) -> None:
    while len(_open.regions) > depth:
        _exit_autocast(_open.regions[-1])


EFFECTS: dict[str, Callable[..., Any]] = {
    "torch::is_grad_enabled": CallersGradMode,
    "torch::set_grad_enabled": _set_grad_enabled,
    "torch::enter_autocast": _enter_autocast,
    "torch::exit_autocast": _exit_autocast,
}
"""Operators called for their effect on the interpreter's state; forward graphs only."""

# --- subgraphs --------------------------------------------------------------------------------------------


def branch(predicate: Any, yes: Step, no: Step, operands: list[Any]) -> tuple[Any, ...]:
    """Call `yes` or `no` with the operands; every operand gets a gradient."""
    return _reaching((yes if predicate else no)(*operands), operands, saved=True)


def _reaching(results: tuple[Any, ...], operands: Sequence[Any], *, saved: bool = False) -> tuple[Any, ...]:
    """Return copies of `results` that autograd records as eager does: as results of one function of all operands.

    All of them require grad where an operand does, and every operand gets a gradient from each, zeros where no step
    used it. They are no views, and no tensors that the backward of a step saved, so that they can be changed in place.
    `saved`: eager saves the operands, and so raises in backward where one was changed in place.
    """
    tracked = [operand for operand in operands if isinstance(operand, torch.Tensor) and operand.requires_grad]
    if not tracked or not torch.is_grad_enabled() or transforms.active():
        return results
    return _Reaching.apply(len(results), saved, *results, *tracked)


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, saved: bool, *tensors: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts = [(torch.empty_like(operand, device="meta"), operand.device) for operand in tensors[count:]]
        if saved:
            ctx.save_for_backward(*tensors[count:])
        return tuple(_copied(t) if isinstance(t, torch.Tensor) else t for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Raises where one was changed.
        _ = ctx.saved_tensors
        return (None, None, *grads, *[torch.zeros_like(layout, device=device) for layout, device in ctx.layouts])


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of `tensor`; a view where its elements share memory, which nobody can change."""
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.view_as(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def loop(condition: Step, step: Step, carried: list[Any], additional: list[Any]) -> tuple[Any, ...]:
    """Call `step` with what it returned last, while `condition` holds of that; return the last."""
    tracked = torch.is_grad_enabled() and any(_requires_grad(value) for value in (*carried, *additional))
    values = tuple(carried)
    if not condition(*values, *additional)[0]:
        if tracked:
            return _reaching(_differentiated_once(values, partial(step, *values, *additional)), [*carried, *additional])
        return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
    while True:
        values = step(*_continued(values, carried), *additional)
        if not condition(*values, *additional)[0]:
            break
    if not tracked:
        return values
    # Eager stacks the values that its backward needs, and returns the last.
    last = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in values]
    return _reaching(tuple(last), [*carried, *additional])


def _continued(values: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
    """Return the arguments of a loop's next step; gradients of values that began without grad are zero.

    Source: torch 2.13, `WhileLoopAutogradOp.backward`, whose loop carries the gradients of such values alone.
    """
    if not torch.is_grad_enabled():
        return list(values)
    # Recorded, so that the steps before it run in backward too.
    return [
        torch.where(value.new_zeros((), dtype=torch.bool), value, value.detach())
        if _requires_grad(value) and not _requires_grad(first)
        else value
        for value, first in zip(values, carried, strict=True)
    ]


def _differentiated_once(values: tuple[Any, ...], step: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
    """Return the results of a loop without a step, differentiated as in eager: as if it had made one.

    Source: torch 2.13, `while_loop_dense`: `WhileLoopAutogradOp.backward` gets one row then, too.
    """
    devices = {value.device.index for value in values if isinstance(value, torch.Tensor) and value.is_cuda}
    # Eager makes that step in backward alone, with new random numbers.
    with torch.random.fork_rng(devices=devices):
        after = step()
    return tuple(
        _ValueOf.apply(value, result)
        if _requires_grad(result)
        else value.detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for value, result in zip(values, after, strict=True)
    )


class _ValueOf(torch.autograd.Function):
    """The first of two tensors, with the gradients of the second."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return value.detach().clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grads[0]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _while_loop_stack_output(condition: Step, step: Step, carried: list[Any], additional: list[Any]) -> tuple[Any, ...]:
    """Return the values of every step, stacked, which the loop's backward needs."""
    values = tuple(carried)
    steps: list[tuple[Any, ...]] = []
    while condition(*values, *additional)[0]:
        values = step(*_continued(values, carried), *additional)
        steps.append(values)
    return _stacked(steps) if steps else tuple(value.unsqueeze(0).clone() for value in values)


def scan(combine: Step, initial: list[Any], xs: list[Any], additional: list[Any]) -> tuple[Any, ...]:
    """Call `combine` row by row with what it returned last; return that, and its further results, stacked."""
    carried: tuple[Any, ...] = tuple(initial)
    steps: list[tuple[Any, ...]] = []
    for index in range(xs[0].shape[0]):
        results = combine(*carried, *(x[index] for x in xs), *additional)
        carried, ys = results[: len(initial)], results[len(initial) :]
        steps.append(ys)
    return _reaching((*carried, *_stacked(steps)), [*initial, *xs, *additional])


def map_rows(step: Step, xs: list[Any], additional: list[Any]) -> tuple[Any, ...]:
    """Call `step` with each row; return the results, stacked."""
    steps = [step(*(x[index] for x in xs), *additional) for index in range(xs[0].shape[0])]
    return _reaching(_stacked(steps), [*xs, *additional], saved=True)


def _stacked(steps: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    columns = zip(*steps, strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)


def _register_hook(step: Step, tensor: torch.Tensor, additional: list[Any]) -> tuple[()]:
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: step(grad, *additional)[0])
    return ()


def _triton_kernel(name: str, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    raise NotSupported(
        f"the model launches the Triton kernel `{name}`, and this form of its program cannot: the bundle's compiled "
        "kernels do, on a GPU that they fit (`device='cuda', trust='native'`), for calls as at the export"
    )


def _checkpoint(step: Step, *operands: Any) -> tuple[Any, ...]:
    def run(*values: Any) -> tuple[Any, ...]:
        # Backward leaves the part, and regions in it, once it has recomputed the saved tensors.
        with restored_on_error():
            return step(*values)

    return checkpoint(run, *operands)


# --- subgraphs that draw random numbers -------------------------------------------------------------------


def _redrawn(step: Step, operands: list[Any]) -> tuple[Any, ...]:
    """Return the results of `step`, which draws random numbers; their gradients are those of a second run.

    Every operand that requires grad gets a gradient, zeros where no result is computed from it.

    Source: torch 2.13, `torch/_higher_order_ops/utils.py` (`create_bw_fn`), for `cond`, `while_loop` and `map`, whose
        backward does not keep the state of the generator.
    """
    if not torch.is_grad_enabled() or not any(map(_requires_grad, operands)):
        return step(*operands)
    if transforms.active():
        raise NotSupported(
            "this call is inside of torch.func or forward-mode AD, and a branch or loop of the model draws random "
            "numbers on the way to gradients. Use torch.autograd outside of them"
        )
    return _Redrawn.apply(step, *operands)


class _Redrawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *operands: Any) -> tuple[Any, ...]:
        device = next(operand.device for operand in operands if isinstance(operand, torch.Tensor))
        ctx.step, ctx.casts = step, autocast_of_now(device.type)
        ctx.others = [None if isinstance(operand, torch.Tensor) else operand for operand in operands]
        ctx.save_for_backward(*[operand if isinstance(operand, torch.Tensor) else None for operand in operands])
        return step(*operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tracked = [_requires_grad(tensor) for tensor in ctx.saved_tensors]
        operands = [
            other if tensor is None else tensor.detach().requires_grad_(is_tracked)
            for tensor, other, is_tracked in zip(ctx.saved_tensors, ctx.others, tracked, strict=True)
        ]
        with torch.enable_grad(), ctx.casts():
            results = ctx.step(*operands)
        roots = [(r, g) for r, g in zip(results, grads, strict=True) if _requires_grad(r)]
        inputs = [operand for operand, is_tracked in zip(operands, tracked, strict=True) if is_tracked]
        found = iter(torch.autograd.grad([r for r, _ in roots], inputs, [g for _, g in roots], materialize_grads=True))
        return (None, *[next(found) if is_tracked else None for is_tracked in tracked])


# --- the operators ----------------------------------------------------------------------------------------


def _of_steps(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator, called with the symbols and compiled subgraphs (`codegen.Function`), by one of steps."""

    def step(value: Any, symbols: dict[str, int]) -> Any:
        if isinstance(value, list):
            return [step(item, symbols) for item in value]
        return (lambda *operands: value([*operands], symbols)) if callable(value) else value

    return lambda symbols, *arguments: function(*[step(argument, symbols) for argument in arguments])


OPERATORS: dict[str, Callable[..., Any]] = {
    "higher_order::cond": _of_steps(lambda *arguments: branch(*arguments)),
    "higher_order::while_loop": _of_steps(lambda *arguments: loop(*arguments)),
    "higher_order::while_loop_stack_output": _of_steps(_while_loop_stack_output),
    "higher_order::scan": _of_steps(lambda *arguments: scan(*arguments)),
    "higher_order::map_impl": _of_steps(lambda *arguments: map_rows(*arguments)),
    "higher_order::invoke_subgraph": _of_steps(lambda step, operands: step(*operands)),
    "higher_order::register_hook": _of_steps(_register_hook),
    "higher_order::autograd_function": _of_steps(
        lambda forward, backwards, operands, *rest: AutogradFunction(forward, backwards, *rest).apply(operands)
    ),
    "higher_order::triton_kernel": _of_steps(_triton_kernel),
    "higher_order::checkpoint": _of_steps(_checkpoint),
}
"""Operators with subgraphs, and launches of the model's own kernels; called with the symbols first.

A bundle says `higher_order::checkpoint` by the operators that begin and end a part, see `checkpoint.outlined`. Exports
of loaded bundles put functions of their own in the place of `branch`, `loop`, `scan` and `map_rows`.
"""

DRAWING: dict[str, Callable[..., Any]] = OPERATORS | {
    "higher_order::cond": _of_steps(lambda predicate, yes, no, operands: _redrawn(yes if predicate else no, operands)),
    "higher_order::while_loop": _of_steps(
        lambda condition, step, *rest: loop(condition, lambda *operands: _redrawn(step, [*operands]), *rest)
    ),
    "higher_order::map_impl": _of_steps(
        lambda step, xs, additional: _redrawn(
            lambda *each: map_rows(step, [*each[: len(xs)]], [*each[len(xs) :]]), [*xs, *additional]
        )
    ),
}
"""`OPERATORS` whose subgraphs draw: eager's backward of three of them runs the subgraph once more, on other numbers."""
