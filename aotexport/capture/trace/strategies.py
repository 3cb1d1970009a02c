"""Ways to make a model's Python code traceable, tried in order until one gives a forward graph.

1. *direct*: run the code itself on fake tensors. Takes most; keeps leaves and non-leaves apart.
2. *export*: `torch.export`'s non-strict front end, for code that only it can follow.
3. *dynamo*: full-graph bytecode capture, for code that takes numbers off tensors in a way that tracing cannot see.
4. *example's path*: like direct, and where the code branches on the values of tensors, it goes the way of the example;
   see `example_values`. It comes last, since the others hold for all values.

Each gives a module that is called in place of the original; tracing then goes the same way for all.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.arithmetic import symbolic_arithmetic
from aotexport.capture.trace.declared_sizes import torch_specs
from aotexport.capture.trace.fakes import sizes_of_data
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.process.patches import Patch, patched
from aotexport.state.world import attributes_restored
from aotexport.torch_internals.applications import applied_functions
from aotexport.torch_internals.calls import tree_map
from aotexport.torch_internals.names import AutogradFunctionApply


@dataclass(frozen=True)
class Strategy:
    """A named way to make the code traceable.

    Attributes:
        reads_code: follows Python's bytecode, so that `int(size)` need not ask for the size.
        prepare: returns a callable with the call's parameters; the state is collected anew from it.
        follows_values: whether code may branch on values; used only if such branches stopped the other strategies.
        runs_own_code: whether it runs the model's code as eager does; a refusal by it is then final. Only such a
            strategy traces arrays of NumPy among the arguments.
        grad: whether gradients are on; if not, the program serves no call that records them.
    """

    name: str
    prepare: Callable[[ExampleCall], nn.Module | Callable[..., Any]]
    follows_values: bool = False
    reads_code: bool = False
    runs_own_code: bool = False
    grad: bool = True

    def target(self, call: ExampleCall) -> Any:
        """Return the callable to trace in place of the call's, with the same parameters."""
        # Some strategies run the code, and fail on the way.
        with attributes_restored(call.module):
            return self.prepare(call)

    @property
    def is_direct(self) -> bool:
        """Whether a trace shows all effects of the model, for all values."""
        return self.runs_own_code and not self.follows_values


def _direct(call: ExampleCall) -> nn.Module | Callable[..., Any]:
    return call.callable


def _exported(strict: bool) -> Callable[[ExampleCall], nn.Module]:
    def prepare(call: ExampleCall) -> nn.Module:
        module = call.callable if isinstance(call.callable, nn.Module) else _FunctionModule(call)
        shapes = _dynamic_shapes(call)
        arithmetic = contextlib.nullcontext() if strict else symbolic_arithmetic(call.callable, call.module)
        with _silent(), _without_backward(), arithmetic, sizes_of_data():
            program = torch.export.export(module, call.args, call.kwargs, dynamic_shapes=shapes, strict=strict)
        # Guards of the export on dynamic sizes become guards of the trace that follows.
        return program.module(check_guards=shapes is not None)

    return prepare


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence the output and logs of a strategy; the user gets its error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _without_backward() -> Iterator[None]:
    """Refuse what `torch.export` loses: backwards of custom autograd functions, and hooks, which it puts on others."""

    def refuse(name: str) -> None:
        raise ExportFailed(f"the custom autograd function `{name}` would lose its backward")

    def apply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any) -> Any:
        if not function.__module__.startswith("torch."):
            refuse(function.__qualname__)
        return original(function, *args, **kwargs)

    def apply_subgraphs(operator: Any, *args: Any, **described: Any) -> Any:
        refuse("taken apart by Dynamo")

    def register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        raise ExportFailed("a hook that the model registers on a tensor would be lost")

    reason = "Refuse custom functions and hooks, whose backward torch.export loses"
    refusals = [
        Patch(owner, name, refusal, reason, in_all_threads=True)
        for owner, name, refusal in (
            (AutogradFunctionApply, "__call__", apply_subgraphs),
            (torch.Tensor, "register_hook", register_hook),
        )
    ]
    with applied_functions(apply, lambda function: refuse(function.__qualname__)), patched(*refusals):
        yield


class _FunctionModule(nn.Module):
    def __init__(self, call: ExampleCall) -> None:
        super().__init__()
        self.owner = call.module
        self.forward = call.callable  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Spec:
    value: Any


def _dynamic_shapes(call: ExampleCall) -> Any:
    """Return the call's dynamic dimensions in the form of `torch.export.export`."""
    if not any(call.axes):
        return None
    specs = list(map(_Spec, torch_specs(call)))
    args, kwargs = tree_map(lambda leaf: leaf.value if isinstance(leaf, _Spec) else None, call.rebuild(specs))
    names = [parameter.name for parameter in call.parameters]
    return {**dict(zip(names, args, strict=False)), **kwargs}


STRATEGIES = (
    Strategy("direct", _direct, runs_own_code=True),
    Strategy("torch.export", _exported(strict=False)),
    Strategy("dynamo", _exported(strict=True), reads_code=True),
    # Branches and loops may write to their operands, and may be recorded by autograd, but not both.
    Strategy("torch.export without gradients", torch.no_grad()(_exported(strict=False)), grad=False),
    Strategy("example's path", _direct, follows_values=True, runs_own_code=True),
)
