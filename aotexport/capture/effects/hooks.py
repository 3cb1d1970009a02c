"""Hooks that the model registers on tensors, as nodes with a subgraph that computes the new gradient.

The node registers a hook on the tensor again when it runs, so autograd calls it when it called the model's. Effects of
a hook in Python are in no graph, and refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.autograd_functions import closed, traced_backward
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import is_user_file, user_line
from aotexport.process.objects import is_a, namespace_of
from aotexport.state.tables import same_item, tables_in
from aotexport.torch_internals.tracing import record_call, tracing_paused


def apply_hook(subgraph: torch.fx.GraphModule, tensor: torch.Tensor, additional: Sequence[Any]) -> list[Any]:
    """Register the hook of a subgraph: the target of its nodes."""
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: torch.fx.Interpreter(subgraph).run(grad, *additional)[0])
    return []


class Handle:
    """The handle that the model gets for a hook; a program cannot remove its hooks again, so `remove` refuses."""

    def remove(self) -> None:
        """Refuse."""
        raise ExportFailed(
            f"{user_line()}the model removes a hook that it registered in the call, which a bundle cannot hold. Leave "
            "the hook out, or let it return gradients as they are where it should do nothing"
        )


def refuse_backward_hooks(module: nn.Module | None) -> None:
    """Refuse a module whose submodules have hooks on their gradients; torch keeps these on nodes of eager's graph."""
    for path, child in module.named_modules() if module is not None else ():
        if child._backward_hooks or child._backward_pre_hooks:
            name = f"`{path}`" if path else "the module"
            raise ExportFailed(
                f"{name} has backward hooks, which a bundle cannot hold. Remove them for the export, and register them "
                "on the loaded module, or let the model call `register_hook` on its tensors"
            )


def record_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Handle:
    """Record that the model registers `hook` on `tensor`, which requires grad, as a node of the current trace.

    Raises:
        ExportFailed: the hook does something that no graph holds.
    """
    where = user_line()
    with tracing_paused() as tracer:
        before = _PythonState.of(hook)
        try:
            grads = [torch.empty_like(tensor)]
            with attempt("hook on a gradient"):
                subgraph = traced_backward(lambda grad: [_checked(hook(grad))], grads, [], tensor.device)
        except ExportFailed as refusal:
            reason = str(refusal.error).strip().partition("\n")[0]
            raise ExportFailed(f"{where}a hook of the model cannot be captured as a graph: {reason}") from refusal.error
        for path in before.changed():
            raise ExportFailed(
                f"{where}a hook of the model changes `{path}`, and a bundle has no Python state. Register it on what "
                "the loaded bundle takes and returns, or write to buffers in place"
            )
        additional = closed([subgraph])
        if _does_something(subgraph):
            record_call(tracer, apply_hook, (subgraph, tensor, additional), [])
        # Gradients that the model itself takes are in the trace, and pass through the hook there.
        tensor.register_hook(hook)
    return Handle()


def _checked(returned: Any) -> torch.Tensor | None:
    if returned is not None and not isinstance(returned, torch.Tensor):
        raise ExportFailed(f"it returns a value of type `{type(returned).__name__}`")
    return returned


def _does_something(subgraph: torch.fx.GraphModule) -> bool:
    has_effects = any(node.op == "call_function" and node.is_impure() for node in subgraph.graph.nodes)
    return has_effects or subgraph.graph.output_node().args[0] != [None]


@dataclass(frozen=True)
class _PythonState:
    """The values that a hook can reach by name, and the items of the containers among them."""

    hook: Any
    values: dict[str, Any]
    containers: list[Any]

    @classmethod
    def of(cls, hook: Any) -> _PythonState:
        values = dict(_reachable(hook, "", set()))
        return cls(
            hook, values, [table for path, value in values.items() for table in tables_in(value, path, seen=set())]
        )

    def changed(self) -> Iterator[str]:
        """Yield the paths of values and items that have changed."""
        for taken in self.containers:
            yield from (change.path for change in taken.changes())
        after = dict(_reachable(self.hook, "", set()))
        for path, value in after.items():
            old = self.values.get(path)
            if not same_item(old, value):
                yield path


def _reachable(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the values that a hook's code can name: closed-over values, globals, and attributes of such objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    prefix = f"{path}." if path else ""
    if is_a(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _reachable(part, path, seen)
    elif is_a(value, BuiltinMethodType):
        yield f"{prefix}{value.__name__}", value.__self__
    elif is_a(value, MethodType):
        yield from _reachable(value.__func__, path, seen)
        yield from _reachable(value.__self__, f"{prefix}self", seen)
    elif is_a(value, FunctionType):
        if is_user_file(value.__code__.co_filename):
            for name, item in _names(value):
                yield f"{prefix}{name}", item
                yield from _reachable(item, f"{prefix}{name}", seen)
    elif not is_a(value, torch.Tensor, type) and _is_users(value):
        for name, item in namespace_of(value).items():
            yield f"{prefix}{name}", item
            if not is_a(item, nn.Module):
                yield from _reachable(item, f"{prefix}{name}", seen)
        call = vars(type(value)).get("__call__")
        if is_a(call, FunctionType):
            yield from _reachable(call, path, seen)


def _is_users(value: Any) -> bool:
    return is_a(value, nn.Module) or not type(value).__module__.startswith(("torch", "builtins"))


def _names(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
