"""Sections 8.2, 8.3, 8.9, 8.10: what callers pass and get."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from tests.reader.values import argument


class CallRefused(Exception):
    """A call that does not fit the program."""


def must(holds: bool, what: str) -> None:
    """Refuse a call unless something holds."""
    if not holds:
        raise CallRefused(what)


Leaf = Callable[[int], Any]
"""Returns the value at a leaf by its index."""

_FACTORIES = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}


def constant(record: Any) -> Any:
    """Return the value of a `Constant`."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind == "bytes":
        return bytes.fromhex(record["hex"])
    if kind == "range":
        return range(record["start"], record["stop"], record["step"])
    if kind == "ellipsis":
        return ...
    if kind == "numpy_number":
        return numpy.dtype(record["dtype"]).type(argument(record["value"], {}, {}))
    return argument(record, {}, {})


def key_of(record: Any) -> Any:
    """Return a key of a mapping."""
    if isinstance(record, list):
        return tuple(map(key_of, record))
    return constant(record) if isinstance(record, dict) else record


def build(tree: dict[str, Any], leaf: Leaf) -> Any:
    """Return what a tree describes (8.10)."""
    kind = tree["kind"]
    if kind == "leaf":
        value = leaf(tree["index"])
        return value.detach().numpy() if tree.get("array") and isinstance(value, torch.Tensor) else value
    if kind == "constant":
        return constant(tree["value"])
    items = [build(each, leaf) for each in tree["items"]]
    if kind == "sequence":
        return _sequence(tree, items)
    if kind == "mapping":
        return _mapping(tree, dict(zip(map(key_of, tree["keys"]), items, strict=True)))
    name, fields = tree["name"], dict(zip(tree["fields"], items, strict=True))
    if tree["type"] == "return_type":
        return getattr(torch.return_types, name)(items)
    if tree["type"] == "namedtuple":
        return collections.namedtuple(name, tree["fields"])(*items)
    if tree["type"] == "dataclass":
        return dataclasses.make_dataclass(name, tree["fields"])(*items)
    if tree["type"] == "model_output":
        return type(name, (collections.OrderedDict,), {})(fields)
    made = type(name, (), {})()
    vars(made).update(fields)
    return made


def _sequence(tree: dict[str, Any], items: list[Any]) -> Any:
    if tree["type"] == "deque":
        return collections.deque(items, tree.get("max_items"))
    plain = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}[tree["type"]]
    return (type(tree["name"], (plain,), {}) if tree.get("name") else plain)(items)


def _mapping(tree: dict[str, Any], items: dict[Any, Any]) -> Any:
    if tree["type"] == "default_dict":
        factory = tree.get("factory")
        return collections.defaultdict(None if factory is None else _FACTORIES[factory], items)
    return {"dict": dict, "ordered_dict": collections.OrderedDict, "counter": collections.Counter}[tree["type"]](items)


class Flattening:
    """The values at the leaves of what a caller passes (8.3).

    Attributes:
        values: by index of the leaf.
        containers: by path.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.values: dict[int, Any] = {}
        self.containers: dict[str, Any] = {}

    def add(self, tree: dict[str, Any], value: Any, path: str) -> None:
        """Flatten a value along its tree."""
        kind = tree["kind"]
        if kind == "leaf":
            must(isinstance(value, numpy.ndarray) == tree.get("array", False), f"{path}: an array")
            known = self.values.setdefault(tree["index"], value)
            must(known is value, f"{path}: not the object of its other leaves")
            return
        if kind == "constant":
            must(alike(value, constant(tree["value"])), f"{path}: another constant")
            return
        self.containers[path] = value
        getattr(self, f"_{kind}")(tree, value, path)

    def _sequence(self, tree: dict[str, Any], value: Any, path: str) -> None:
        name = tree.get("name") or {"size": "Size"}.get(tree["type"], tree["type"])
        must(type(value).__name__ == name, f"{path}: another type")
        must(len(value) == len(tree["items"]), f"{path}: another length")
        must(getattr(value, "maxlen", None) == tree.get("max_items"), f"{path}: another `maxlen`")
        if tree["type"] in ("set", "frozenset"):
            rest = list(value)
            for each in tree["items"]:
                same = [other for other in rest if alike(other, constant(each["value"]))]
                must(bool(same), f"{path}: other items")
                rest.remove(same[0])
            return
        for index, (item, own) in enumerate(zip(tree["items"], value, strict=True)):
            self.add(item, own, f"{path}[{index}]")

    def _mapping(self, tree: dict[str, Any], value: Any, path: str) -> None:
        must(isinstance(value, dict | collections.UserDict), f"{path}: no dict")
        said, keys = [key_of(each) for each in tree["keys"]], list(value)
        must(len(said) == len(keys), f"{path}: another number of keys")
        if tree.get("any_order"):
            keys = [key for each in said for key in keys if is_key(key, each)]
        must(len(said) == len(keys) and all(map(is_key, keys, said)), f"{path}: other keys")
        for key, item in zip(said, tree["items"], strict=True):
            self.add(item, value[key], f"{path}[{key!r}]")

    def _named_fields(self, tree: dict[str, Any], value: Any, path: str) -> None:
        must(tree["type"] != "object" or type(value).__name__ == tree["name"], f"{path}: another class")
        for field, item in zip(tree["fields"], tree["items"], strict=True):
            is_mapping = isinstance(value, Mapping)
            must(field in value if is_mapping else hasattr(value, field), f"{path}: no `{field}`")
            self.add(item, value[field] if is_mapping else getattr(value, field), f"{path}.{field}")


def is_key(value: Any, said: Any) -> bool:
    """Return whether a key is that of the tree: equal as in Python, floats as floats (8.3)."""
    return value == said and _floats(value) == _floats(said)


def _floats(key: Any) -> Any:
    return tuple(map(_floats, key)) if isinstance(key, tuple) else isinstance(key, float)


def alike(value: Any, said: Any) -> bool:
    """Return whether constants are equal and of one type (8.3)."""
    if type(value) is not type(said):
        return False
    if isinstance(said, float):
        return (math.isnan(value) and math.isnan(said)) or (
            value == said and math.copysign(1, value) == math.copysign(1, said)
        )
    if isinstance(said, complex):
        return alike(value.real, said.real) and alike(value.imag, said.imag)
    return bool(value == said)


def change(container: Any, record: dict[str, Any], leaf: Leaf) -> None:
    """Give a container of the caller its items (8.9)."""
    keys = [key_of(each) for each in record["keys"]]
    made = [None if item is None else build(item, leaf) for item in record["items"]]
    if not isinstance(container, dict | list | set | collections.deque | collections.UserDict):
        for key, item, new in zip(keys, record["items"], made, strict=True):
            if item is not None:
                setattr(container, key, new)
        return
    before = container if isinstance(container, dict | collections.UserDict) else list(container)
    before = dict(before) if not isinstance(before, list) else before
    pairs = zip(keys, record["items"], made, strict=True)
    after = [(key, before[key] if item is None else new) for key, item, new in pairs]
    container.clear()
    if isinstance(container, dict | collections.UserDict):
        container.update(after)
    else:
        (container.update if isinstance(container, set) else container.extend)([item for _, item in after])
