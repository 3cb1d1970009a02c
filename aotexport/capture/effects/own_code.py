"""The code objects of the model itself, to look for questions that tracing does not see."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from aotexport.model.source_lines import is_user_file
from aotexport.process.objects import is_a


def own_code(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> Iterator[CodeType]:
    """Yield the code objects of the functions of a callable and its module, found by following the names in each."""
    children = () if module is None else module.modules()
    pending = [(target.__func__ if is_a(target, MethodType) else target, type(module))]
    pending += [(getattr(type(child), "forward", None), type(child)) for child in children]
    seen: set[Any] = set()
    while pending:
        function, owner = pending.pop()
        if not is_a(function, FunctionType) or (function, owner) in seen:
            continue
        seen.add((function, owner))
        if not is_user_file(function.__code__.co_filename):
            continue
        for code in _codes(function.__code__):
            yield code
            called = [vars(base)[name] for name in code.co_names for base in owner.__mro__ if name in vars(base)]
            called += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
            pending += [(callee, owner) for callee in called]


def codes_of_function(function: Any) -> Iterator[CodeType]:
    """Yield the code objects of a custom autograd function."""
    for name in ("forward", "setup_context", "backward", "vjp"):
        yield from own_code(inspect.unwrap(getattr(function, name)), None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
