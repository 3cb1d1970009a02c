"""Find tensors that a model's code can reach outside of its tables of state: by attributes, closures, globals."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from aotexport.model.source_lines import is_user_file
from aotexport.process.objects import is_a

_NOT_ENTERED = (type, ModuleType, CodeType, FrameType, BuiltinFunctionType, str, bytes, bool, int, float, type(None))
_LEAVES = frozenset(_NOT_ENTERED)
"""Found sooner than by `isinstance`, which goes through all types."""


def reached_tensors(roots: Iterable[Any]) -> list[torch.Tensor]:
    """Return the plain tensors within reach of models, functions or arguments, each once; see `reached`."""
    tensors = (value for value in reached(roots) if is_a(value, torch.Tensor))
    return [tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)]


def reached(roots: Iterable[Any]) -> list[torch.Tensor | nn.Module]:
    """Return the tensors and modules within reach of models, functions or arguments, each once.

    Functions are followed to their closures and to the globals that they name; classes are not entered, except for the
    attributes of modules' classes.

    Args:
        roots: objects to start from.
    """
    found: list[torch.Tensor | nn.Module] = []
    pending = list(roots)
    # `seen` keeps the objects alive, so that no other object gets their id.
    seen: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if type(value) in _LEAVES or id(value) in seen or is_a(value, *_NOT_ENTERED):
            continue
        seen[id(value)] = value
        if is_a(value, torch.Tensor):
            found.append(value)
        elif is_a(value, FunctionType):
            pending += _of_function(value) if is_user_file(value.__code__.co_filename) else ()
        else:
            pending += gc.get_referents(value)
            if is_a(value, nn.Module):
                found.append(value)
                bases = [base for base in type(value).__mro__[:-1] if id(base) not in seen]
                seen.update((id(base), base) for base in bases)
                pending += [item for base in bases for item in vars(base).values()]
    return found


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__closure__ or ()
    yield function.__defaults__
    yield function.__kwdefaults__
    for name in _names(function.__code__):
        yield function.__globals__.get(name)


def _names(code: CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)
