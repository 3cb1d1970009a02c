"""Attributes of the exported module that calls read and change: counters, caches, the last result.

A program takes them as one more argument, a dict by path, and changes it as it changes containers of its caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotexport_runtime.engines.codegen import Environment, constant_value
from aotexport_runtime.schema.manifest import ModuleAttribute
from aotexport_runtime.trees import builder

ARGUMENT = "self"
"""Name of the argument; no method has another of this name."""


class PythonState:
    """The attributes of a loaded module, from call to call.

    Attributes:
        values: what they are now, by path.
    """

    def __init__(self, attributes: Sequence[ModuleAttribute], tensors: Sequence[torch.Tensor]) -> None:
        """Begin with what they were at export.

        Args:
            attributes: their records.
            tensors: the state of the module, in the order of the manifest.
        """
        environment = Environment()
        self.values: dict[str, Any] = {
            each.name: builder(each.value, lambda leaf: constant_value(leaf.value, environment))(list(tensors))
            for each in attributes
        }

    def passed_with(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call with the attributes; those that the caller passes go first."""
        return {ARGUMENT: self.values, **kwargs} if self.values else kwargs

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by what `function` makes of it."""
        self.values = _applied(self.values, function)


def _applied(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _applied(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_applied(item, function) for item in value))
    if isinstance(value, deque):
        return deque((_applied(item, function) for item in value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(_applied(item, function) for item in value)
    for name, item in getattr(value, "__dict__", {}).items():
        setattr(value, name, _applied(item, function))
    return value
