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

from aotexport.capture.effects.autograd_functions import traced_backward
from aotexport.capture.effects.grad_mode import make_relative
from aotexport.errors import ExportFailed
from aotexport.model.containers import same_item, snapshots
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import is_user_file, user_line
from aotexport.process.objects import is_a, namespace_of
from aotexport.torch_internals.tracing import lift_tensors, record_call, tracing_paused

REGISTER_HOOK = torch.Tensor.register_hook
"""Torch's own method, also while it is patched."""


def apply_hook(subgraph: torch.fx.GraphModule, tensor: torch.Tensor, additional: Sequence[Any]) -> list[Any]:
    """Register the hook of a subgraph: the target of its nodes."""
    if tensor.requires_grad:
        REGISTER_HOOK(tensor, lambda grad: torch.fx.Interpreter(subgraph).run(grad, *additional)[0])
    return []


class Handle:
    """The handle that the model gets for a hook; a program cannot remove its hooks again, so `remove` refuses."""

    def remove(self) -> None:
        """Refuse.

        Raises:
            ExportFailed: always.
        """
        raise ExportFailed(
            f"{user_line()}the model removes a hook that it registered in the call, which a bundle cannot hold. Leave "
            "the hook out, or let it return gradients as they are where it should do nothing"
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def refuse_backward_hooks(module: nn.Module | None) -> None:
    """Refuse a module whose submodules have hooks on their gradients; torch keeps these on nodes of eager's graph.

    Raises:
        ExportFailed: there is one.
    """
    for path, child in module.named_modules() if module is not None else ():
        if child._backward_hooks or child._backward_pre_hooks:
            name = f"`{path}`" if path else "the module"
            raise ExportFailed(
                f"{name} has backward hooks, which a bundle cannot hold. Remove them for the export, and register them "
                "on the loaded module, or let the model call `register_hook` on its tensors"
            )


def record_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Handle:
    """Record that the model registers `hook` on `tensor`, as a node of the current trace.

    Args:
        tensor: requires grad.
        hook: returns the new gradient, or None to leave it.

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
        additional = lift_tensors([subgraph])
        make_relative(subgraph.graph)
        subgraph.recompile()
        if _does_something(subgraph):
            record_call(tracer, apply_hook, (subgraph, tensor, additional), [])
        # Gradients that the model itself takes are in the trace, and pass through the hook there.
        REGISTER_HOOK(tensor, hook)
    return Handle()


def _checked(returned: Any) -> torch.Tensor | None:
    if returned is not None and not isinstance(returned, torch.Tensor):
        raise ExportFailed(f"it returns a value of type `{type(returned).__name__}`")
    return returned


def _does_something(subgraph: torch.fx.GraphModule) -> bool:
    return subgraph.graph.output_node().args[0] != [None] or _has_effects(subgraph.graph)


def _has_effects(subgraph: torch.fx.Graph) -> bool:
    return any(node.op == "call_function" and node.is_impure() for node in subgraph.nodes)


def unfit_hook(graph: torch.fx.Graph) -> str | None:
    """Return why the functional graph would not do the same as the forward graph's hooks; None: it does.

    Args:
        graph: the forward graph of a program with gradients.
    """
    for node in graph.find_nodes(op="call_function", target=apply_hook):
        subgraph, tensor, _ = node.args
        if tensor.op == "placeholder":
            return "the model registers a hook on an input, whose gradient others add to"
        if not _is_linear(getattr(graph.owning_module, subgraph.target).graph):
            return "a hook of the model is no linear function of gradients, and sees parts of them when differentiated"
    return None


_LINEAR = frozenset(
    (
        *("_to_copy", "alias", "clone", "contiguous", "expand", "mean", "neg", "permute", "reshape", "select", "slice"),
        *("squeeze", "sum", "t", "to", "transpose", "unsqueeze", "view", "zeros_like"),
    )
)
"""Base names of operators that are linear in their first operand."""

_BILINEAR = frozenset(("bmm", "linear", "matmul", "mm", "mul"))
"""Base names of operators that are linear in each of their first two operands."""


def _is_linear(subgraph: torch.fx.Graph) -> bool:
    """Return whether a hook is known to be linear: its result for a sum of gradients is the sum of its results."""
    (grad, *_), output = subgraph.find_nodes(op="placeholder"), subgraph.output_node()
    derived = {grad}
    for node in subgraph.nodes:
        operands = [operand in derived for operand in node.args]
        if node.op != "call_function" or not any(operand in derived for operand in node.all_input_nodes):
            continue
        base = str(node.target).removeprefix("aten.").partition(".")[0]
        if base.startswith("sym_"):
            continue
        first = operands[0] and sum(operands) == 1
        linear = first and (base in _LINEAR or base in _BILINEAR or base == "div")
        bilinear = base in _BILINEAR and operands[:2] == [False, True]
        addition = base in ("add", "sub") and operands == [True, True]
        if not (linear or bilinear or addition) or node.is_impure():
            return False
        derived.add(node)
    return all(node in derived for node in output.all_input_nodes) and not _has_effects(subgraph)


# --- Python objects within reach of a hook ----------------------------------------------------------------


@dataclass(frozen=True)
class _PythonState:
    """The values that a hook can reach by name, and the items of the containers among them."""

    hook: Any
    values: dict[str, Any]
    containers: list[Any]

    @classmethod
    def of(cls, hook: Any) -> _PythonState:
        values = dict(_reachable(hook, "", set()))
        return cls(hook, values, [taken for path, value in values.items() for taken in snapshots(value, path)])

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
