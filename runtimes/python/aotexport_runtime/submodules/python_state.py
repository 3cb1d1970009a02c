"""Attributes of the exported module that calls read and change, which a program takes as a dict argument by path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.schema.manifest import ModuleAttribute
from aotexport_runtime.schema.trees import Tree
from aotexport_runtime.values.trees import builder

if TYPE_CHECKING:
    from aotexport_runtime.values.structure import IndexOf

ARGUMENT = "self"
"""Name of the argument; no method has another of this name."""


class PythonState:
    """The attributes of a loaded module, from call to call: their current `values`, by path."""

    def __init__(self, attributes: Iterable[ModuleAttribute], tensors: Sequence[torch.Tensor]) -> None:
        """Begin with their values at export; `tensors` are the state of the module, in the order of the manifest."""
        self.values = _built({each.name: each.value for each in attributes}, tensors)

    def passed_with(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call with the attributes; the caller's own take precedence."""
        return {ARGUMENT: self.values, **kwargs} if self.values else kwargs

    def trees(self, index_of: IndexOf) -> dict[str, Tree]:
        """Return the current attributes as trees, by path; see `take_apart`."""
        from aotexport_runtime.values.structure import take_apart

        return {name: take_apart(value, name, index_of) for name, value in self.values.items()}

    def replaced(self, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return the current attributes, with `function` applied to each of their tensors."""
        positions: dict[int, int] = {}
        tensors: list[torch.Tensor] = []

        def index_of(tensor: torch.Tensor, path: str) -> int:
            if id(tensor) not in positions:
                positions[id(tensor)] = len(tensors)
                tensors.append(function(tensor))
            return positions[id(tensor)]

        return _built(self.trees(index_of), tensors)

    def copied(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return a copy of the current attributes; tensors are detached from the graph that computed them."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_leaf or id(tensor) in memo:
                return copy.deepcopy(tensor, memo)
            return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))

        return self.replaced(copied)


def _built(trees: dict[str, Tree], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    environment, leaves = Environment(), list(tensors)
    return {
        name: builder(tree, lambda leaf: constant_value(leaf.value, environment))(leaves)
        for name, tree in trees.items()
    }


INTERNAL = frozenset(
    (
        *("_calls", "_changes", "_constants", "_environment", "_fixed", "_hooked", "_own_attributes", "_methods"),
        *("_origin", "_plans", "_request", "_served", "_targets", "_untold", "bundle"),
    )
)
"""Attributes of a loaded module and its submodules that belong to the runtime."""
