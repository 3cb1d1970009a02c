"""Tables of Python values that a call may change: attributes, items, globals, variables of closures.

No code of the classes of the values runs here; see `process/objects.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from aotexport.model.source_lines import is_user_file
from aotexport.model.structure import is_plain_object, object_attributes
from aotexport.process.objects import file_of, is_a, namespace_of, text_of
from aotexport_runtime.submodules.python_state import INTERNAL
from aotexport_runtime.submodules.submodule import Loaded

CONTAINERS = (dict, list, set, deque, UserDict)
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_WITHOUT_ITEMS = frozenset((type(None), bool, int, float, str, torch.Tensor, nn.Parameter))
"""Types of most items: none is or holds a container."""
_MISSING = object()


class Change(NamedTuple):
    """An item that was added, replaced or removed.

    Attributes:
        path: its place, in Python's notation.
        old: the item before; None if there was none.
        new: the item now; None if there is none.
        key: its key in the table.
        table: the table as it was.
    """

    path: str
    old: Any
    new: Any
    key: Any
    table: Table


class Table(NamedTuple):
    """The items of an owner at a time; the items themselves are not copied.

    Attributes:
        owner: a container, a module or another object, a class, a Python module, or a function (of a closure).
        path: its place.
        root: place of the attribute, global or argument in which it was found.
        items: by key, index or name; those of sets by their text.
        by_name: whether paths of items are written with a dot.
    """

    owner: Any
    path: str
    root: str
    items: dict[Any, Any]
    by_name: bool = False

    def path_of(self, key: Any) -> str:
        """Return the path of an item."""
        return f"{self.path}.{key}".lstrip(".") if self.by_name else f"{self.path}[{text_of(key)}]"

    def changes(self) -> Iterator[Change]:
        """Yield the changes since."""
        now = items_of(self.owner)
        for key in {**self.items, **now}:
            old, new = self.items.get(key), now.get(key)
            if key not in self.items and is_a(self.owner, type):
                # A class that had none of this name has inherited it.
                old = next((vars(base)[key] for base in self.owner.__mro__[1:] if key in vars(base)), None)
            if key not in self.items or key not in now or not same_item(old, new):
                yield Change(self.path_of(key), old, new, key, self)

    def has_changed(self) -> bool:
        """Return whether any item, or the order of keys, has changed since."""
        now = items_of(self.owner)
        return list(now) != list(self.items) or not all(map(same_item, self.items.values(), now.values()))

    def put_back(self, keys: Collection[Any] | None = None) -> None:
        """Give the owner the items that it had; those of `keys` alone, if given."""
        now, items = items_of(self.owner), self.items
        if keys is not None:
            items = {key: item for key, item in now.items() if key not in keys}
            items |= {key: self.items[key] for key in keys if key in self.items}
        same = len(now) == len(items) and all(now.get(key, _MISSING) is item for key, item in items.items())
        if not same or (is_a(self.owner, dict) and list(now) != list(items)):
            _fill(self.owner, now, items)


def table_of(owner: Any, path: str, root: str = "", *, by_name: bool = True) -> Table:
    """Return the table of an owner as it is now."""
    return Table(owner, path, root, items_of(owner), by_name)


def is_users_object(value: Any) -> bool:
    """Return whether a value is an object of a class in the user's own files, whose only state is its attributes."""
    return is_plain_object(value) and is_user_class(type(value))


def is_user_class(type_: type) -> bool:
    """Return whether a class is defined in the user's own files."""
    return is_user_file(file_of(sys.modules.get(type_.__module__)) or "<built-in>")


def tables_in(
    value: Any, path: str, *, enters: Callable[[Any], bool] | None = is_users_object, seen: set[int] | None = None
) -> list[Table]:
    """Return a table per container and object in `value`, itself included; tuples are looked into.

    Args:
        value: any value.
        path: its place.
        enters: whether an object that is no container has a table; None: none, and tuples are not looked into.
        seen: ids of owners to leave out, to which those found are added; None: an owner has a table per place, and none
            may hold itself.
    """
    found: list[Table] = []

    def visit(value: Any, place: str) -> None:
        if seen is not None and id(value) in seen:
            return
        if is_a(value, tuple) and enters is not None:
            names = getattr(type(value), "_fields", None)
            items = dict(zip(itertools.count() if names is None else names, tuple.__iter__(value), strict=False))
            table = Table(value, place, path, items, names is not None)
        elif is_a(value, *CONTAINERS) or (enters is not None and enters(value)):
            if seen is not None:
                seen.add(id(value))
            fields = is_a(value, dict) and dataclasses.is_dataclass(value)
            found.append(table := table_of(value, place, path, by_name=fields or not is_a(value, *CONTAINERS)))
        else:
            return
        for key, item in table.items.items():
            if type(item) not in _WITHOUT_ITEMS:
                visit(item, table.path_of(key))

    if type(value) not in _WITHOUT_ITEMS:
        visit(value, path)
    return found


def items_of(owner: Any) -> dict[Any, Any]:
    """Return the items of an owner as it stores them; a subclass may give others, or raise."""
    if type(owner) is dict:
        return owner.copy()
    if is_a(owner, UserDict):
        return dict(namespace_of(owner).get("data", {}))
    base = next((base for base in _BASES if is_a(owner, base)), None)
    if base is set:
        return {text_of(item): item for item in base.__iter__(owner)}
    if base is not None:
        items = base.__iter__(owner)
        return {key: dict.__getitem__(owner, key) for key in items} if is_a(owner, dict) else dict(enumerate(items))
    if is_a(owner, FunctionType):
        variables = dict[str, Any]()
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # It has no value yet.
                variables[name] = cell.cell_contents
        return variables
    if is_a(owner, Loaded):
        return {name: value for name, value in namespace_of(owner).items() if name not in INTERNAL}
    if is_a(owner, type, ModuleType, nn.Module, torch.Tensor):
        return dict(namespace_of(owner))
    return object_attributes(owner)


def _fill(owner: Any, now: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Give an owner, which has the items `now`, other items."""
    if is_a(owner, *CONTAINERS):
        owner.clear()
        getattr(owner, "extend" if is_a(owner, list, deque) else "update")(
            items if is_a(owner, dict, UserDict) else items.values()
        )
        return
    for name in {**now, **items}:
        if now.get(name, _MISSING) is not items.get(name, _MISSING):
            _put(owner, name, items.get(name, _MISSING))


def _put(owner: Any, name: str, value: Any) -> None:
    if is_a(owner, FunctionType):
        owner, name = (owner.__closure__ or ())[owner.__code__.co_freevars.index(name)], "cell_contents"
    if is_a(owner, ModuleType, nn.Module, torch.Tensor):
        table = namespace_of(owner)
        table.pop(name, None) if value is _MISSING else table.update({name: value})
    elif value is _MISSING:
        (type if is_a(owner, type) else object).__delattr__(owner, name)
    else:
        (type if is_a(owner, type) else object).__setattr__(owner, name, value)


def same_item(old: Any, new: Any) -> bool:
    """Return whether an item is unchanged: the same object, or an equal number or string."""
    return old is new or (type(old) is type(new) and is_a(old, bool, int, float, str) and old == new)
