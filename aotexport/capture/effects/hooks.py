"""Hooks that the model registers on tensors, as nodes with a subgraph that computes the new gradient.

The node registers a hook on the tensor again when it runs, so autograd calls it when it called the model's. Effects of
a hook in Python are in no graph, and refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.autograd_functions import closed, traced_backward
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import is_user_file, user_line
from aotexport.process.objects import is_a
from aotexport.state.tables import Table, tables_in
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
        before = list(_tables(hook))
        try:
            grads = [torch.empty_like(tensor)]
            with attempt("hook on a gradient"):
                subgraph = traced_backward(lambda grad: [_checked(hook(grad))], grads, [], tensor.device)
        except ExportFailed as refusal:
            reason = str(refusal.error).strip().partition("\n")[0]
            raise ExportFailed(f"{where}a hook of the model cannot be captured as a graph: {reason}") from refusal.error
        for change in (change for table in before for change in table.changes()):
            raise ExportFailed(
                f"{where}a hook of the model changes `{change.path}`, and a bundle has no Python state. Register it on "
                "what the loaded bundle takes and returns, or write to buffers in place"
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


def _tables(hook: Any) -> Iterator[Table]:
    """Yield what a hook's code can name: variables of closures, attributes and items, and those of globals."""
    pending, seen = [(hook, "")], set[int]()
    while pending:
        value, path = pending.pop()
        prefix = f"{path}." if path else ""
        if is_a(value, functools.partial):
            pending += [(part, path) for part in (value.func, *value.args, *value.keywords.values())]
        elif is_a(value, MethodType):
            pending += [(value.__func__, path), (value.__self__, f"{prefix}self")]
        elif is_a(value, BuiltinMethodType):
            pending.append((value.__self__, f"{prefix}{value.__name__}"))
        else:
            for table in tables_in(value, path, enters=_is_followed, seen=seen):
                yield table
                items = {key: item for key, item in table.items.items() if is_a(item, *_BOUND)}
                if is_a(table.owner, FunctionType):
                    names = table.owner.__globals__
                    items |= {name: names[name] for name in table.owner.__code__.co_names if name in names}
                pending += [(item, table.path_of(key)) for key, item in items.items()]
                pending.append((vars(type(table.owner)).get("__call__"), table.path))


_BOUND = (functools.partial, MethodType, BuiltinMethodType)


def _is_followed(value: Any) -> bool:
    if is_a(value, FunctionType):
        return is_user_file(value.__code__.co_filename)
    is_users = is_a(value, nn.Module) or not type(value).__module__.startswith(("torch", "builtins"))
    return is_users and not is_a(value, torch.Tensor, type, *_BOUND)
