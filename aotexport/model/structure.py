"""Turn nested Python values into trees and flat leaves."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
from collections.abc import Callable
from collections.abc import Mapping as MappingABC
from keyword import iskeyword
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.array_proxies import is_proxy, is_scalar
from aotexport.process.objects import is_a, namespace_of
from aotexport.torch_internals.calls import SUPPORTED_NODES
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.values.structure import encode_constant, encode_key, encode_python_value, is_constant, is_key
from aotexport_runtime.values.trees import FACTORIES, SETS, ModelOutput

LeafIndex = Callable[[Any, str], int | None]
"""Returns the index of a leaf by its value and path; None: the value is a constant, not a leaf."""

_HEAP_TYPE = 1 << 9
"""Flag of types made by Python code."""


def tree_of(value: Any, path: str, leaf_index: LeafIndex, *, role: str) -> Tree:
    """Return the tree of nested containers of tensors, sizes and constants.

    `path` is the place of `value`, and `role` is `input` or `output`, for errors. `leaf_index` is called for every
    tensor, array and symbolic integer (and every plain int, which may be dynamic). `ExportFailed`: a value that is no
    tensor, constant or known container.
    """
    return _TreeMaker(leaf_index, role).visit(value, path)


def flattened(value: Any, path: str, *, role: str) -> tuple[Tree, list[Any]]:
    """Return the tree of `value`, and its leaves; integers are constants. See `tree_of`."""
    leaves: list[Any] = []

    def leaf_index(leaf: Any, path: str) -> int | None:
        if type(leaf) is int:
            return None
        leaves.append(leaf)
        return len(leaves) - 1

    return tree_of(value, path, leaf_index, role=role), leaves


class _TreeMaker:
    def __init__(self, leaf_index: LeafIndex, role: str) -> None:
        self._leaf_index = leaf_index
        self._role = role
        self._above: list[int] = []

    def _refused(self, path: str, reason: str) -> ExportFailed:
        return ExportFailed(f"{self._role} `{path}` {reason}")

    def visit(self, value: Any, path: str) -> Tree:
        if id(value) in self._above:
            raise self._refused(path, "holds itself; a bundle holds trees of values")
        self._above.append(id(value))
        try:
            return self._visit_once(value, path)
        finally:
            self._above.pop()

    def _visit_once(self, value: Any, path: str) -> Tree:
        is_integer = type(value) is int and is_constant(value)
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) or is_integer:
            index = self._leaf_index(value, path)
            if index is not None:
                return Leaf(index=index)
        if is_scalar(value):
            raise self._refused(
                path,
                "is a NumPy scalar that the call computes, which a bundle cannot hold. Return an "
                "array or a tensor (`torch.as_tensor`)",
            )
        if is_proxy(value) or (type(value) is np.ndarray and self._role == "input"):
            index = self._leaf_index(value, path)
            assert index is not None
            return Leaf(index=index, array=True)
        if is_constant(value):
            return Constant(value=encode_constant(value))
        if (constant := encode_python_value(value)) is not None:
            return Constant(value=constant)
        if isinstance(value, torch.Size):
            # Sizes in a `torch.Size` argument are constants: `dynamic_shapes` has no place for their dimensions.
            sizes = (
                self.visit(item, f"{path}[{i}]") if self._role == "output" else Constant(value=item)
                for i, item in enumerate(value)
            )
            return Sequence(type="size", items=tuple(sizes))
        if type(value) in SETS.values():
            return self._set(value, path)
        if isinstance(value, tuple | list | collections.deque):
            return self._sequence(value, path)
        if isinstance(value, dict) or (isinstance(value, collections.UserDict) and self._role == "input"):
            return self._mapping(value, path)
        if not isinstance(value, type) and dataclasses.is_dataclass(value):
            return self._fields("dataclass", type(value).__name__, dataclass_attributes(value, self._is_kept), path)
        if attributes := _value_attributes(value):
            # None of them may be dynamic: the code gets the object itself.
            known = tuple(Constant(value=encode_constant(item)) for item in attributes.values())
            return NamedFields(type="dataclass", name=type(value).__name__, fields=tuple(attributes), items=known)
        if type(value) in SUPPORTED_NODES and self._role == "output":
            children = _registered_children(value)
            return self._fields("dataclass", type(value).__name__, children, path)
        if is_plain_object(value):
            attributes = object_attributes(value)
            if self._role == "output":
                attributes = {name: item for name, item in attributes.items() if self._is_kept(item)}
            # A class among the attributes is code, as the object's own class is.
            attributes = {name: item for name, item in attributes.items() if not isinstance(item, type)}
            if attributes:
                return self._fields("object", type(value).__name__, attributes, path)
        raise self._refused(
            path,
            f"is {_kind(value)}, which a bundle cannot hold. "
            f"{'Pass' if self._role == 'input' else 'Return'} {_instead(value)}",
        )

    def _is_kept(self, item: Any) -> bool:
        # An output comes back as a plain record, without attributes that only its own class can use.
        return (
            self._role == "input"
            or isinstance(item, torch.SymInt)
            or _holds_tensor(item, depth=4)
            or _is_plain(item, depth=4)
        )

    def _set(self, value: Any, path: str) -> Tree:
        for item in value:
            if not is_constant(item) or isinstance(item, slice):
                raise self._refused(
                    path, f"is a set with {_kind(item)}; sets may hold numbers, strings, None and dtypes"
                )
        items = tuple(Constant(value=encode_constant(item)) for item in sorted(value, key=repr))
        return Sequence(type="set" if type(value) is set else "frozenset", items=items)

    def _sequence(self, value: tuple[Any, ...] | list[Any] | collections.deque[Any], path: str) -> Tree:
        if type(value).__module__ == "torch.return_types":
            fields: tuple[str, ...] = getattr(type(value), "__match_args__", ())
            return self._fields("return_type", type(value).__name__, dict(zip(fields, value, strict=True)), path)
        names: tuple[str, ...] | None = getattr(value, "_fields", None)
        if isinstance(value, tuple) and names is not None:
            return self._fields("namedtuple", type(value).__name__, dict(zip(names, value, strict=True)), path)
        own = type(value) not in (tuple, list, torch.Size, collections.deque)
        if own and not _is_plain_sequence(value):
            raise self._refused(
                path,
                f"is a `{type(value).__name__}`, a subclass of a sequence with a constructor, items or "
                "attributes of its own; use a plain one",
            )
        items = tuple(self.visit(item, f"{path}[{index}]") for index, item in enumerate(value))
        if isinstance(value, collections.deque):
            return Sequence(type="deque", items=items, max_items=value.maxlen)
        name = type(value).__name__ if own else None
        return Sequence(type="list" if isinstance(value, list) else "tuple", items=items, name=name)

    def _mapping(self, value: MappingABC[Any, Any], path: str) -> Tree:
        if dataclasses.is_dataclass(value) or isinstance(value, ModelOutput):
            return self._fields("model_output", type(value).__name__, dict(value), path)
        kind, factory = "ordered_dict" if isinstance(value, collections.OrderedDict) else "dict", None
        if self._role == "output" and type(value) is collections.Counter:
            kind = "counter"
        elif self._role == "output" and type(value) is collections.defaultdict:
            kind, factory = "default_dict", self._factory(value, path)
        own = [name for name in getattr(value, "__dict__", {}) if name != "data" and not name.startswith("_")]
        if own and self._role == "input":
            raise self._refused(
                path,
                f"is a `{type(value).__name__}` with the attribute `{own[0]}` beside its items, which "
                "a bundle does not look at. Pass a plain dict, and the attribute as an argument of its own",
            )
        for key in value:
            if not is_key(key):
                raise self._refused(
                    path, f"has the key {key!r}; keys may be strings, numbers, bytes, booleans, None or tuples of these"
                )
        items = tuple(self.visit(item, f"{path}[{key!r}]") for key, item in value.items())
        return Mapping(type=kind, keys=tuple(map(encode_key, value)), items=items, factory=factory)

    def _factory(self, value: collections.defaultdict[Any, Any], path: str) -> Any:
        factory = next((name for name, type_ in FACTORIES.items() if type_ is value.default_factory), None)
        if factory is None and value.default_factory is not None:
            raise self._refused(
                path,
                "is a defaultdict whose missing values code of the model makes, which a bundle cannot "
                "hold. Return a plain dict",
            )
        return factory

    def _fields(self, kind: Any, name: str, fields: dict[str, Any], path: str) -> Tree:
        items = tuple(self.visit(item, f"{path}.{field}") for field, item in fields.items())
        odd = [field for field in fields if not field.isidentifier() or iskeyword(field) or field.startswith("__")]
        if odd:
            raise self._refused(path, f"has the attribute {odd[0]!r}, no name that a bundle can hold")
        return NamedFields(type=kind, name=name, fields=tuple(fields), items=items)


def _kind(value: Any) -> str:
    if isinstance(value, int):
        return "an integer of more than 64 bits"
    if isinstance(value, str):
        return f"the string {value!r}, no Unicode text"
    return f"a `{type(value).__module__}.{type(value).__qualname__}`"


def _instead(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "a tensor (`torch.from_numpy`)"
    if isinstance(value, np.generic):
        return "a number (`.item()`) or a tensor"
    if isinstance(value, nn.Module):
        return "tensors. Of a function that makes a module, export what it returns"
    return "tensors, numbers, strings, None, or tuples, lists, dicts, named tuples or dataclasses of them"


def _is_plain_sequence(value: Any) -> bool:
    """Return whether a list or tuple of another class has no state or behaviour of its own beside its items."""
    base = list if isinstance(value, list) else tuple
    if not isinstance(value, list | tuple) or getattr(value, "__dict__", None):
        return False
    names = ("__new__", "__init__", "__iter__", "__getitem__", "__len__")
    return all(getattr(type(value), name) is getattr(base, name) for name in names)


def _value_attributes(value: Any) -> dict[str, Any]:
    """Return the name and value of a member of an enumeration, whose class no runtime has; empty for anything else."""
    if isinstance(value, enum.Enum) and isinstance(value.name, str):
        return {"name": value.name, **({"value": value.value} if is_constant(value.value) else {})}
    return {}


def is_plain_object(value: Any) -> bool:
    """Return whether `value` is an object of a class written in Python, whose only state is its attributes."""
    kinds = (type, torch.Tensor, nn.Module, list, tuple, dict, set, frozenset, collections.deque, np.ndarray, enum.Enum)
    kinds += (FunctionType, MethodType, ModuleType, collections.UserDict, torch.SymInt, torch.SymFloat, torch.SymBool)
    if is_a(value, *kinds) or is_proxy(value):
        return False
    written_in_python = type(value).__flags__ & _HEAP_TYPE or is_a(value, SimpleNamespace)
    return bool(written_in_python) and (type(value).__dictoffset__ != 0 or bool(_slots(value)))


def object_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    found: dict[str, Any] = {}
    for name in _slots(value):
        with contextlib.suppress(AttributeError):  # It has no value yet.
            found[name] = object.__getattribute__(value, name)
    return found | namespace_of(value)


def dataclass_attributes(value: Any, is_kept: Callable[[Any], bool] = lambda item: True) -> dict[str, Any]:
    """Return the fields of a dataclass, and its further attributes for which `is_kept` is true."""
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    others = object_attributes(value).items()
    return fields | {name: item for name, item in others if name not in fields and is_kept(item)}


def _slots(value: Any) -> list[str]:
    declared = [vars(base).get("__slots__", ()) for base in reversed(type(value).__mro__)]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_holds_tensor(item, depth - 1) for item in (*items, *getattr(value, "__dict__", {}).values()))


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a value is a constant, or a list, tuple or dict of constants."""
    if type(value) in (list, tuple, dict) and depth:
        keys, items = (value.keys(), value.values()) if isinstance(value, dict) else ((), value)
        return all(map(is_key, keys)) and all(_is_plain(item, depth - 1) for item in items)
    return is_constant(value)


def _registered_children(value: Any) -> dict[str, Any]:
    """Return the children of a container that is registered with torch's tree utilities, by field name."""
    node = SUPPORTED_NODES[type(value)]
    if node.flatten_with_keys_fn is not None:
        pairs, _ = node.flatten_with_keys_fn(value)
    else:
        pairs = list(enumerate(node.flatten_fn(value)[0]))
    named = [(str(key).strip("[].'\""), child) for key, child in pairs]
    return {name if name.isidentifier() else f"item_{i}": child for i, (name, child) in enumerate(named)}
