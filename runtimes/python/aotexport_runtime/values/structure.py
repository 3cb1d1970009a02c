"""Takes values of the kinds that `trees.builder` makes apart into trees."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.values.constants import (
    encode_constant,
    encode_key,
    encode_python_value,
    is_constant,
    is_key,
    is_python_value,
)
from aotexport_runtime.values.trees import FACTORIES, SETS, ModelOutput

IndexOf = Callable[[torch.Tensor, str], int]
"""Returns the index of a tensor, given the tensor and its path."""


def take_apart(value: Any, path: str, index_of: IndexOf) -> Tree:
    """Return the tree of `value`, from which `trees.builder` makes an equal value.

    Args:
        value: nested containers of tensors and constants.
        path: its path, for errors and for `index_of`.
        index_of: called for every tensor.

    Raises:
        NotSupported: a value of another kind, or a container that holds itself.
    """
    return _Walk(index_of).visit(value, path)


class _Walk:
    def __init__(self, index_of: IndexOf) -> None:
        self._index_of = index_of
        self._above: list[int] = []

    def visit(self, value: Any, path: str) -> Tree:
        if isinstance(value, torch.Tensor):
            return Leaf(index=self._index_of(value, path))
        if is_constant(value):
            return Constant(value=encode_constant(value))
        if is_python_value(value):
            return Constant(value=encode_python_value(value))
        if id(value) in self._above:
            raise NotSupported(f"`{path}` holds itself; a bundle holds trees of values")
        self._above.append(id(value))
        try:
            tree = self._sequence(value, path) or self._mapping(value, path) or self._record(value, path)
        finally:
            self._above.pop()
        if tree is None:
            raise NotSupported(f"`{path}` is a `{type(value).__name__}`, which a bundle cannot hold")
        return tree

    def _sequence(self, value: Any, path: str) -> Tree | None:
        type_ = type(value)
        if type_ in SETS.values():
            # `repr` gives the same order in every process.
            items = [self.visit(item, path) for item in sorted(value, key=repr)]
            return Sequence(type="set" if type_ is set else "frozenset", items=tuple(items))
        name = type_.__name__ if type_.__bases__ in ((list,), (tuple,)) and not hasattr(value, "_fields") else None
        if name is None and type_ not in (list, tuple, torch.Size, collections.deque):
            return None
        items = tuple(self.visit(item, f"{path}[{index}]") for index, item in enumerate(value))
        if isinstance(value, collections.deque):
            return Sequence(type="deque", items=items, max_items=value.maxlen)
        kind = "size" if type_ is torch.Size else "list" if isinstance(value, list) else "tuple"
        return Sequence(type=kind, items=items, name=None if type_ is torch.Size else name)

    def _mapping(self, value: Any, path: str) -> Tree | None:
        if isinstance(value, ModelOutput):
            return self._fields("model_output", value, dict(value), path)
        kinds = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
        if type(value) not in kinds:
            return None
        odd = [key for key in value if not is_key(key)]
        if odd:
            raise NotSupported(f"`{path}` has the key {odd[0]!r}, which a bundle cannot hold")
        keys = tuple(map(encode_key, value))
        items = tuple(self.visit(item, f"{path}[{key!r}]") for key, item in value.items())
        if isinstance(value, collections.defaultdict):
            factory: Any = None if value.default_factory is None else _factory(value.default_factory, path)
            return Mapping(type="default_dict", keys=keys, items=items, factory=factory)
        kind = {dict: "dict", collections.OrderedDict: "ordered_dict", collections.Counter: "counter"}[type(value)]
        return Mapping(type=kind, keys=keys, items=items)  # type: ignore[arg-type]

    def _record(self, value: Any, path: str) -> Tree | None:
        if isinstance(value, tuple):
            is_torchs = type(value).__module__ == "torch.return_types"
            names: tuple[str, ...] = getattr(type(value), "__match_args__" if is_torchs else "_fields", ())
            kind = "return_type" if is_torchs else "namedtuple"
            return self._fields(kind, value, dict(zip(names, value, strict=True)), path) if names else None
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # Calls may have set further attributes.
            return self._fields("dataclass", value, vars(value), path)
        return None

    def _fields(self, kind: Any, value: Any, fields: dict[str, Any], path: str) -> NamedFields:
        items = tuple(self.visit(item, f"{path}.{name}") for name, item in fields.items())
        return NamedFields(type=kind, name=type(value).__name__, fields=tuple(fields), items=items)


def _factory(factory: Any, path: str) -> str:
    name = next((name for name, known in FACTORIES.items() if known is factory), None)
    if name is None:
        raise NotSupported(f"`{path}` makes its missing values by {factory!r}, which a bundle cannot hold")
    return name


__all__ = ["IndexOf", "take_apart"]
