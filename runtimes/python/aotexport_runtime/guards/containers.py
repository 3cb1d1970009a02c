"""Lists, dicts, sets and objects of the caller, and the changes of a call to them."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from aotexport_runtime.schema.program import ContainerChange
from aotexport_runtime.schema.trees import Constant
from aotexport_runtime.values.trees import Builder, builder, key_of


class Containers:
    """The containers of one call that it changes, collected while its arguments are flattened."""

    def __init__(self, changed: Collection[str], found: dict[str, Any]) -> None:
        """Collect the containers at the paths `changed` in `found`, by path."""
        self._changed = changed
        self._found = found
        self._places: dict[int, str] = {}

    def take(self, path: str, value: Any) -> str | None:
        """Record a container of the call; return a violation in words, or None."""
        if not self._changed:
            return None
        if path in self._changed:
            self._found[path] = value
        first = self._places.setdefault(id(value), path)
        if first != path and (first in self._changed or path in self._changed):
            return f"expected another object than `{first}`, as at capture, since the call changes it"
        return None


class ContainerChanges:
    """The changes of a program to the containers of its caller."""

    def __init__(self, changes: Sequence[ContainerChange], constant: Callable[[Constant], Any]) -> None:
        """Prepare to make `changes`; `constant` returns the value of a constant leaf."""
        self._changes = [
            (
                change.path,
                [(key_of(key), _builder(item, constant)) for key, item in zip(change.keys, change.items, strict=True)],
            )
            for change in changes
        ]

    def apply(self, containers: dict[str, Any], outputs: Sequence[Any]) -> None:
        """Change the containers of a call.

        Args:
            containers: the changed ones, by path.
            outputs: results of the program's graph.
        """
        values = list(outputs)
        for path, items in self._changes:
            _fill(containers[path], [(key, build and build(values), build is None) for key, build in items])


def _builder(tree: Any, constant: Callable[[Constant], Any]) -> Builder | None:
    return None if tree is None else builder(tree, constant)


def _fill(container: Any, items: list[tuple[Any, Any, bool]]) -> None:
    """Give a container new items: each with its key, its value, and whether the old value stays."""
    if isinstance(container, list | dict | UserDict | deque | set):
        if isinstance(container, set):
            container.clear()
            container.update(value for _, value, _ in items)
            return
        after = [(key, container[key] if stays else value) for key, value, stays in items]
        container.clear()
        if isinstance(container, list | deque):
            container.extend(value for _, value in after)
        else:
            # `Counter.update` would add to the old counts.
            dict.update(container, after) if isinstance(container, dict) else container.update(after)
        return
    for key, value, stays in items:
        if not stays:
            setattr(container, key, value)


__all__ = ["ContainerChanges", "Containers"]
