"""Attributes of a model, put back as they were, and the refusals of calls that change them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.containers import Snapshot, snapshots
from aotexport_runtime.submodules.python_state import INTERNAL, WithAttributes

_MISSING = object()


class ChangedOnFirstCall(ExportFailed):
    """The call changed the model as a first call may; after one call for real, the next may change nothing."""


class PythonStateChanged(ExportFailed):
    """The call changed attributes that later calls read, or may read.

    Attributes:
        names: the attributes' paths.
    """

    def __init__(self, names: Iterable[str], message: str) -> None:
        super().__init__(message)
        self.names = tuple(dict.fromkeys(names))


class AttributeChanged(ExportFailed):
    """The call changed a number, flag or string of the model.

    Attributes:
        name: the attribute's path.
        old: its value before.
        new: its value after.
    """

    def __init__(self, name: str, old: Any, new: Any) -> None:
        super().__init__(
            f"the call changes the attribute `{name}` of the model from {old!r} to {new!r}, and a bundle has no "
            "Python state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
        self.name, self.old, self.new = name, old, new


@contextlib.contextmanager
def attributes_restored(module: nn.Module | None) -> Iterator[None]:
    """Put the attributes of the model, and their items, back after the block."""
    put_back = attributes_to_put_back(named_modules(module))
    try:
        yield
    finally:
        put_back()


@contextlib.contextmanager
def changed_for_a_while(module: nn.Module, change: Callable[[], None]) -> Iterator[None]:
    """Let `change` set attributes of the model and their items; put these back after the block, and no others."""
    before = [(child, own_attributes(child)) for _, child in named_modules(module)]
    containers = containers_of(named_modules(module))
    changed: list[Snapshot] = []
    slots: list[tuple[dict[str, Any], str, Any]] = []
    try:
        try:
            change()
        finally:
            changed += [snapshot for snapshot in containers if snapshot.has_changed()]
            for child, old in before:
                new = own_attributes(child)
                names = [name for name in {**old, **new} if old.get(name, _MISSING) is not new.get(name, _MISSING)]
                slots += [(vars(child), name, old.get(name, _MISSING)) for name in names]
        yield
    finally:
        for snapshot in changed:
            snapshot.restore()
        for table, name, value in slots:
            if value is _MISSING:
                table.pop(name, None)
            else:
                table[name] = value


def attributes_to_put_back(modules: Iterable[tuple[str, nn.Module]]) -> Callable[[], None]:
    """Return a function that puts the attributes of modules, and their items, back as they are now.

    Args:
        modules: each with its path; their submodules are not included.
    """
    modules = list(modules)
    before = [(path, child, own_attributes(child)) for path, child in modules]
    containers = containers_of(modules)

    def put_back() -> None:
        for snapshot in containers:
            snapshot.restore()
        restore(before)

    return put_back


def attributes_watched(module: nn.Module | None) -> Callable[[], bool]:
    """Return a function that tells whether the attributes of the model, and their items, are as they are now."""
    before = [(child, own_attributes(child)) for _, child in named_modules(module)]
    containers = containers_of(named_modules(module))

    def are_same() -> bool:
        same = all(_identical(old, own_attributes(child)) for child, old in before)
        return same and not any(snapshot.has_changed() for snapshot in containers)

    return are_same


def named_modules(module: nn.Module | None) -> list[tuple[str, nn.Module]]:
    """Return the modules of a model, each with its path; none for a function."""
    return [] if module is None else list(module.named_modules())


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; of a loaded bundle, without those internal to its calls."""
    if not isinstance(module, WithAttributes):
        return vars(module).copy()
    return {name: value for name, value in vars(module).items() if name not in INTERNAL}


def containers_of(modules: Iterable[tuple[str, nn.Module]]) -> list[Snapshot]:
    """Return the containers in the attributes of modules, including torch's own tables of their state."""
    found: list[Snapshot] = []
    for path, child in modules:
        for name, value in own_attributes(child).items():
            found += snapshots(value, f"{path}.{name}" if path else name)
    return found


def restore(before: list[tuple[str, nn.Module, dict[str, Any]]]) -> list[tuple[str, Any, Any]]:
    """Put every attribute back; return the changed ones as `(name, old, new)`."""
    changes: list[tuple[str, Any, Any]] = []
    for path, child, old in before:
        new = own_attributes(child)
        if _identical(old, new):
            continue
        for key in {**old, **new}:
            if old.get(key) is not new.get(key):
                changes.append((f"{path}.{key}" if path else key, old.get(key), new.get(key)))
        for key in new:
            del vars(child)[key]
        vars(child).update(old)
    return changes


def _identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two dicts hold the same objects under the same keys, in the same order."""
    return len(one) == len(other) and all(
        key == also and value is same for (key, value), (also, same) in zip(one.items(), other.items(), strict=True)
    )
