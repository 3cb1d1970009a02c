"""Look at objects of any package without running their code, which may raise (a lazy import) or answer all (a mock)."""

from __future__ import annotations

from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeGuard, TypeVar

import torch

_T = TypeVar("_T")
_SAID = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))


def is_a(value: object, *types: type[_T]) -> TypeGuard[_T]:
    """Return whether an object's class is or derives from one of `types`; `isinstance` also asks the object itself."""
    return issubclass(type(value), types)


def namespace_of(value: object) -> dict[str, Any]:
    """Return the attributes that an object has of itself (its `__dict__`, not a copy); empty: it holds none so."""
    for base in type(value).__mro__:
        table: Any = vars(base).get("__dict__")
        if type(table) in (GetSetDescriptorType, MemberDescriptorType):
            return table.__get__(value)
    return {}


def file_of(module: object) -> str:
    """Return the file of a loaded module, whatever stands for it in `sys.modules`; empty: it has none."""
    file = namespace_of(module).get("__file__")
    return file if type(file) is str else ""


def text_of(value: object) -> str:
    """Return an object in Python's notation; of a class that may have a notation of its own, its class and place."""
    if type(value) is tuple:
        return f"({', '.join(map(text_of, value))}{',' * (len(value) == 1)})"
    return repr(value) if type(value) in _SAID else f"<{type(value).__qualname__} at {id(value):#x}>"
