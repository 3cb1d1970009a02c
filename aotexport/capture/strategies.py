"""Ways to make a model's Python code traceable, tried in order until one gives a forward graph.

1. *direct*: run the code itself on fake tensors. Takes most; keeps leaves and non-leaves apart.
2. *export*: `torch.export`'s non-strict front end, for code that only it can follow.
3. *dynamo*: full-graph bytecode capture, for code that takes numbers off tensors (`int(n)`) in a way that tracing
   cannot see.
4. *example's path*: like direct, and where the code branches on the values of tensors, it goes the way of the example;
   see `example_values`. It comes last, since the others hold for all values.

Each gives a module that is called in place of the original; tracing then goes the same way for all.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotexport.capture.call import ExampleCall
from aotexport.torch_internals import tree_map


@dataclass(frozen=True)
class Strategy:
    """A named way.

    Attributes:
        name: shown to the user.
        prepare: returns a callable with the parameters of the call's, for the state collected anew from it.
        follows_values: whether code may branch on values; then it is for calls that nothing but such branches stopped.
    """

    name: str
    prepare: Callable[[ExampleCall], nn.Module | Callable[..., Any]]
    follows_values: bool = False


def _direct(call: ExampleCall) -> nn.Module | Callable[..., Any]:
    return call.callable


def _exported(strict: bool) -> Callable[[ExampleCall], nn.Module]:
    def prepare(call: ExampleCall) -> nn.Module:
        module = call.callable if isinstance(call.callable, nn.Module) else _FunctionModule(call)
        shapes = _dynamic_shapes(call)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(module, call.args, call.kwargs, dynamic_shapes=shapes, strict=strict)
        return program.module(check_guards=False)

    return prepare


class _FunctionModule(nn.Module):
    def __init__(self, call: ExampleCall) -> None:
        super().__init__()
        self.owner = call.module
        self.forward = call.callable  # type: ignore[method-assign]


def _dynamic_shapes(call: ExampleCall) -> Any:
    """Return the call's dynamic dimensions as `torch.export.export` takes them."""
    if not any(call.axes):
        return None
    by_tensor = {id(tensor): axes for tensor, axes in zip(call.tensors, call.axes, strict=True)}
    args = tree_map(lambda leaf: by_tensor.get(id(leaf)), call.args)
    kwargs = tree_map(lambda leaf: by_tensor.get(id(leaf)), call.kwargs)
    names = [parameter.name for parameter in call.parameters]
    return {**dict(zip(names, args, strict=False)), **kwargs}


STRATEGIES = (
    Strategy("direct", _direct),
    Strategy("torch.export", _exported(strict=False)),
    Strategy("dynamo", _exported(strict=True)),
    Strategy("example's path", _direct, follows_values=True),
)
