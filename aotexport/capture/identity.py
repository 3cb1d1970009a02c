"""Python code that asks whether two of its variables are one object (`x is y`): tracing does not see the question."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from aotexport.capture.sources import is_user_file

_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")


def asks_identity(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> bool:
    """Return whether the model's own code, as far as its names tell what it calls, compares variables by `is`.

    Args:
        target: what is traced.
        module: the module that it is of; None: a plain function.
    """
    children = () if module is None else module.modules()
    pending = [(getattr(target, "__func__", target), type(module))]
    pending += [(getattr(type(child), "forward", None), type(child)) for child in children]
    seen: set[Any] = set()
    while pending:
        function, owner = pending.pop()
        if not isinstance(function, FunctionType) or (function, owner) in seen:
            continue
        seen.add((function, owner))
        if not is_user_file(function.__code__.co_filename):
            continue
        for code in _codes(function.__code__):
            if _compares(code):
                return True
            called = [vars(base)[name] for name in code.co_names for base in owner.__mro__ if name in vars(base)]
            called += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
            pending += [(callee, owner) for callee in called]
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _compares(code: CodeType) -> bool:
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return any(
        # Newer Pythons load two variables by one instruction.
        last == "IS_OP" and second.startswith(_VARIABLE) and (second.count("LOAD_") == 2 or first.startswith(_VARIABLE))
        for first, second, last in zip(names, names[1:], names[2:], strict=False)
    )
