"""Python containers (lists, dicts and sets), and their changes by a call, which tracing does not see."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from aotexport.model.source_lines import is_user_file
from aotexport.model.structure import is_plain_object
from aotexport.process.objects import file_of, is_a, namespace_of, text_of

_WITHOUT_ITEMS = frozenset((type(None), bool, int, float, str, torch.Tensor, nn.Parameter))
"""Types of most items: none is or holds a container."""
_BASES = (OrderedDict, dict, list, tuple, set, deque)
Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]


@dataclass(frozen=True)
class ItemChange:
    """An item that a call added, replaced or removed.

    Attributes:
        path: place of the item, in Python's notation.
        old: the item before; None if there was none.
        new: the item now; None if there is none.
        is_attribute: whether the item is an attribute of an object.
    """

    path: str
    old: Any
    new: Any
    is_attribute: bool = False


class Snapshot(NamedTuple):
    """A container, or an object's attributes, with the items at a time; the items themselves are not copied."""

    path: str
    container: Container
    items: Container
    of_object: bool = False

    def changes(self) -> Iterator[ItemChange]:
        """Yield the changes since."""
        before, after = _by_key(self.items), _by_key(self.container)
        for key in {**before, **after}:
            old, new = before.get(key), after.get(key)
            if key not in before or key not in after or not same_item(old, new):
                yield ItemChange(f"{self.path}[{text_of(key)}]", old, new, self.of_object)

    def has_changed(self) -> bool:
        """Return whether any item has changed since."""
        # Most tables of a module are its hooks', and empty.
        return bool(_base(self.container).__len__(self.container) or self.items) and any(True for _ in self.changes())

    def restore(self) -> None:
        """Give the container the items that it had."""
        if self.has_changed():
            refill(self.container, self.items)


def refill(container: Any, items: Any) -> None:
    """Give a list, dict, set or deque (or a `collections.UserDict`) other items."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)


def snapshot(value: Any, path: str) -> Snapshot | None:
    """Return a snapshot of a container, without nested ones; None: `value` is no container."""
    return Snapshot(path, value, _copy(value)) if is_a(value, list, dict, set, deque) else None


def snapshots(value: Any, path: str) -> list[Snapshot]:
    """Return a snapshot of every container in `value`, itself included, through tuples as well."""
    if type(value) in _WITHOUT_ITEMS:
        return []
    if type(value) in (dict, OrderedDict) and not value:
        return [Snapshot(path, value, {})]
    found: list[Snapshot] = []
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        if is_a(value, list, dict, set, deque):
            seen.add(id(value))
            found.append(Snapshot(path, value, _copy(value)))
        if is_plain_object(value) and is_user_class(type(value)) and id(value) not in seen:
            seen.add(id(value))
            table = namespace_of(value)
            found.append(Snapshot(path, table, dict(table), of_object=True))
            items: Any = list(table.items())
        elif is_a(value, dict):
            items = _stored(value).items()
        elif is_a(value, list, tuple, deque):
            items = enumerate(_items(value))
        else:
            return
        for key, item in list(items):
            if type(item) not in _WITHOUT_ITEMS:
                visit(item, f"{path}[{text_of(key)}]")

    visit(value, path)
    return found


def is_user_class(type_: type) -> bool:
    """Return whether a class is defined in the user's own files."""
    return is_user_file(file_of(sys.modules.get(type_.__module__)) or "<built-in>")


def _copy(container: Container) -> Container:
    if is_a(container, dict):
        return _stored(container)
    return set(_items(container)) if is_a(container, set) else list(_items(container))


def _items(container: Any) -> Iterator[Any]:
    """Return the stored items of a container; a subclass may give others, or raise."""
    return _base(container).__iter__(container)


def _base(container: Any) -> Any:
    return next(base for base in _BASES if is_a(container, base))


def _stored(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return the stored items of a dict; a subclass may return others (a new object per access)."""
    if type(table) is dict:
        return table.copy()
    return {key: dict.__getitem__(table, key) for key in _items(table)}


def _by_key(container: Container) -> dict[Any, Any]:
    if is_a(container, dict):
        return _stored(container)
    if is_a(container, set):
        return {text_of(item): item for item in _items(container)}
    return dict(enumerate(_items(container)))


def same_item(old: Any, new: Any) -> bool:
    """Return whether an item is unchanged: the same object, or an equal number or string."""
    return old is new or (type(old) is type(new) and is_a(old, bool, int, float, str) and old == new)
