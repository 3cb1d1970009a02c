"""Encode tensors of wrapper subclasses: their structure, and their contexts as data."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport.values.sizes import encode_size
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.graph import Subclass
from aotexport_runtime.schema.trees import Constant, Instance, Mapping, Sequence, Tree
from aotexport_runtime.values.structure import encode_constant, is_constant
from aotexport_runtime.values.subclasses import flatten, is_wrapper, type_name

CLASSES: dict[str, type] = {}
"""Every encoded class, by its name in bundles; used when this process loads a bundle itself."""


def encode_subclass(tensor: torch.Tensor, label: str) -> Subclass | None:
    """Return the structure of a tensor; None: it is a plain one.

    Args:
        tensor: real or fake.
        label: the tensor, for errors.

    Raises:
        ExportFailed: its context holds something other than data.
    """
    if not is_wrapper(tensor):
        return None
    try:
        inner, context = flatten(tensor)
    except NotSupported as error:
        raise ExportFailed(f"{label} is a `{type(tensor).__name__}` that a bundle cannot hold: {error}") from error
    return Subclass(
        type=_named(type(tensor)),
        attributes=tuple(inner),
        inner=tuple(encode_subclass(value, f"{label}.{name}") for name, value in inner.items()),
        context=_encode_context(context, f"the context of {label}, a `{type(tensor).__name__}`,"),
        shape=tuple(encode_size(size) for size in tensor.shape),
        stride=tuple(encode_size(step) for step in tensor.stride()),
    )


def _named(type_: type) -> str:
    name = type_name(type_)
    CLASSES[name] = type_
    return name


def _encode_context(value: Any, label: str) -> Tree:
    if isinstance(value, enum.Enum):
        name = Constant(value=encode_constant(value.name))
        return Instance(form="enum", type=_named(type(value)), fields=("name",), items=(name,))
    if is_constant(value):
        return Constant(value=encode_constant(value))
    if type(value) in (tuple, list, torch.Size):
        kind: Any = {tuple: "tuple", list: "list", torch.Size: "size"}[type(value)]
        return Sequence(type=kind, items=tuple(_encode_context(item, label) for item in value))
    if type(value) is dict and all(isinstance(key, str | int | bool | None) for key in value):
        items = tuple(_encode_context(item, label) for item in value.values())
        return Mapping(type="dict", keys=tuple(value), items=items)
    names: tuple[str, ...] | None = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return _instance("namedtuple", value, dict(zip(names, value, strict=True)), label)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _instance("dataclass", value, fields, label)
    raise ExportFailed(
        f"{label} holds a `{type(value).__module__}.{type(value).__qualname__}`, which a bundle cannot hold: it holds "
        "numbers, strings, None, dtypes, sizes, enumerations, and tuples, lists, dicts and dataclasses of them"
    )


def _instance(form: Any, value: Any, fields: dict[str, Any], label: str) -> Instance:
    items = tuple(_encode_context(item, label) for item in fields.values())
    return Instance(form=form, type=_named(type(value)), fields=tuple(fields), items=items)


def part_names(name: str, record: Subclass | None) -> list[str]:
    """Return the names `<name>.<attribute>` of the plain tensors of a structure, depth first; `name` of a plain one."""
    if record is None:
        return [name]
    pairs = zip(record.attributes, record.inner, strict=True)
    return [part for attribute, inner in pairs for part in part_names(f"{name}.{attribute}", inner)]


def types_of(record: Subclass | None) -> set[str]:
    """Return the names of the classes that a structure needs, including those of its context."""
    if record is None:
        return set()
    return {record.type, *_types_in(record.context)}.union(*map(types_of, record.inner))


def _types_in(tree: Tree) -> set[str]:
    found = {tree.type} if isinstance(tree, Instance) else set[str]()
    return found.union(*map(_types_in, getattr(tree, "items", ())))
