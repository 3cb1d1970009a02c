"""Nested Python values to trees and flat leaves."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from collections.abc import Mapping as MappingABC
from typing import Any

import numpy as np
import torch
from torch import nn

from aotexport.encode.values import encode_constant, is_constant
from aotexport.errors import ExportFailed
from aotexport.torch_internals.names import SUPPORTED_NODES
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.trees import SETS

LeafIndex = Callable[[Any, str], int | None]
"""Gives the index of a leaf value by the value and its path; None: not a leaf but a constant."""


def tree_of(value: Any, path: str, leaf_index: LeafIndex, *, what: str) -> Tree:
    """Return the tree of `value`.

    Args:
        value: nested containers of tensors, sizes and constants.
        path: where `value` stands, for errors and for `leaf_index`.
        leaf_index: called for every tensor and symbolic integer (and every plain int, which may be dynamic).
        what: `input` or `output`, for errors.

    Raises:
        ExportFailed: a value that is no tensor, constant or known container.
    """

    def visit(value: Any, path: str) -> Tree:
        is_integer = type(value) is int and is_constant(value)
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) or is_integer:
            index = leaf_index(value, path)
            if index is not None:
                return Leaf(index=index)
        if is_constant(value):
            return Constant(value=encode_constant(value))
        if isinstance(value, torch.Size):
            # Of an argument's sizes none is dynamic: torch has no place for a dimension in them.
            sizes = (
                visit(item, f"{path}[{i}]") if what == "output" else Constant(value=item)
                for i, item in enumerate(value)
            )
            return Sequence(type="size", items=tuple(sizes))
        if type(value) in SETS.values():
            return _set(value, path)
        if isinstance(value, tuple | list):
            return _sequence(value, path)
        if isinstance(value, dict) or (isinstance(value, collections.UserDict) and what == "input"):
            return _mapping(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value)]
            return _fields("dataclass", type(value).__name__, {name: getattr(value, name) for name in fields}, path)
        if what == "input" and (attributes := _value_attributes(value)):
            # None of them may be dynamic: the object itself is what the code gets.
            known = tuple(Constant(value=encode_constant(item)) for item in attributes.values())
            return NamedFields(type="dataclass", name=type(value).__name__, fields=tuple(attributes), items=known)
        if type(value) in SUPPORTED_NODES and what == "output":
            children = _registered_children(value)
            return _fields("dataclass", type(value).__name__, children, path)
        if what == "output" and not isinstance(value, nn.Module) and (attributes := _tensor_attributes(value)):
            return _fields("dataclass", type(value).__name__, attributes, path)
        raise ExportFailed(
            f"{what} `{path}` is {_kind(value)}, which a bundle cannot hold. "
            f"{'Pass' if what == 'input' else 'Return'} {_instead(value)}"
        )

    def _set(value: Any, path: str) -> Tree:
        for item in value:
            if not is_constant(item) or isinstance(item, slice):
                raise ExportFailed(
                    f"{what} `{path}` is a set with {_kind(item)}; sets may hold numbers, strings, None and dtypes"
                )
        items = tuple(Constant(value=encode_constant(item)) for item in sorted(value, key=repr))
        return Sequence(type="set" if type(value) is set else "frozenset", items=items)

    def _sequence(value: tuple[Any, ...] | list[Any], path: str) -> Tree:
        if type(value).__module__ == "torch.return_types":
            fields: tuple[str, ...] = getattr(type(value), "__match_args__", ())
            return _fields("return_type", type(value).__name__, dict(zip(fields, value, strict=True)), path)
        names: tuple[str, ...] | None = getattr(value, "_fields", None)
        if isinstance(value, tuple) and names is not None:
            return _fields("namedtuple", type(value).__name__, dict(zip(names, value, strict=True)), path)
        if type(value) not in (tuple, list, torch.Size):
            raise ExportFailed(
                f"{what} `{path}` is a `{type(value).__name__}`, a subclass of a sequence; use a plain one"
            )
        items = tuple(visit(item, f"{path}[{index}]") for index, item in enumerate(value))
        return Sequence(type="list" if isinstance(value, list) else "tuple", items=items)

    def _mapping(value: MappingABC[Any, Any], path: str) -> Tree:
        if dataclasses.is_dataclass(value):
            return _fields("model_output", type(value).__name__, dict(value), path)
        own = [name for name in getattr(value, "__dict__", {}) if name != "data" and not name.startswith("_")]
        if own and what == "input":
            raise ExportFailed(
                f"{what} `{path}` is a `{type(value).__name__}` with the attribute `{own[0]}` beside its items, which "
                "a bundle does not look at. Pass a plain dict, and the attribute as an argument of its own"
            )
        for key in value:
            if not all(isinstance(part, str | int | None) for part in (key if type(key) is tuple else (key,))):
                raise ExportFailed(
                    f"{what} `{path}` has the key {key!r}; keys may be strings, integers, booleans, None or tuples of "
                    "these"
                )
        items = tuple(visit(item, f"{path}[{key!r}]") for key, item in value.items())
        kind = "ordered_dict" if isinstance(value, collections.OrderedDict) else "dict"
        return Mapping(type=kind, keys=tuple(value), items=items)

    def _fields(kind: Any, name: str, fields: dict[str, Any], path: str) -> Tree:
        items = tuple(visit(item, f"{path}.{field}") for field, item in fields.items())
        return NamedFields(type=kind, name=name, fields=tuple(fields), items=items)

    return visit(value, path)


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
    return "tensors, numbers, strings, None, or tuples, lists, dicts, named tuples or dataclasses of them"


def _value_attributes(value: Any) -> dict[str, Any]:
    """Return what a member of an enumeration or a range is known by; empty for anything else.

    A call must pass an object with equal attributes: the runtime does not have the classes of enumerations.
    """
    if isinstance(value, range):
        return {"start": value.start, "stop": value.stop, "step": value.step}
    if isinstance(value, enum.Enum) and isinstance(value.name, str):
        return {"name": value.name, **({"value": value.value} if is_constant(value.value) else {})}
    return {}


def _tensor_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of the model's own class (a key-value cache) that hold tensors, or nothing.

    Such an object comes back as a plain record: a bundle has no class of it, and so none of its methods.
    """
    attributes = getattr(value, "__dict__", {})
    return {
        name: item
        for name, item in attributes.items()
        if name.isidentifier() and not name.startswith("__") and _holds_tensor(item, depth=4)
    }


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_holds_tensor(item, depth - 1) for item in (*items, *getattr(value, "__dict__", {}).values()))


def _registered_children(value: Any) -> dict[str, Any]:
    """Return the children of a container that is registered with torch's tree utilities, by field name."""
    node = SUPPORTED_NODES[type(value)]
    if node.flatten_with_keys_fn is not None:
        pairs, _ = node.flatten_with_keys_fn(value)
        names = [str(key).strip("[].'\"") for key, _ in pairs]
        children = [child for _, child in pairs]
    else:
        children, _ = node.flatten_fn(value)
        names = [f"item_{index}" for index in range(len(children))]
    return {
        name if name.isidentifier() else f"item_{i}": child
        for i, (name, child) in enumerate(zip(names, children, strict=True))
    }
