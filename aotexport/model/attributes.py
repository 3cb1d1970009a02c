"""Attributes of a model, put back as they were, and the refusals of calls that change them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.containers import ItemChange, snapshots
from aotexport_runtime.submodules.python_state import INTERNAL
from aotexport_runtime.submodules.submodule import Loaded

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
    """The call changed numbers, flags or strings of the model.

    Attributes:
        changes: per attribute its path, and its values before and after.
    """

    def __init__(self, changes: Sequence[tuple[str, Any, Any]]) -> None:
        name, old, new = changes[0]
        super().__init__(
            f"the call changes the attribute `{name}` of the model from {old!r} to {new!r}, and a bundle has no "
            "Python state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
        self.changes = changes


class Attributes:
    """The attributes of modules as they are now, and the items of the containers in them."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Remember them.

        Args:
            modules: each with its path; their submodules are not included.
        """
        self._before = [(path, child, _own(child)) for path, child in modules]
        self._containers = [
            snapshot
            for path, _, attributes in self._before
            for name, value in attributes.items()
            for snapshot in snapshots(value, _joined(path, name))
        ]

    @classmethod
    def of(cls, module: nn.Module | None) -> Attributes:
        """Return those of a model, its submodules included; none for a function."""
        return cls([] if module is None else module.named_modules())

    def changed_items(self) -> list[ItemChange]:
        """Return the changes of containers since."""
        return [change for snapshot in self._containers for change in snapshot.changes()]

    def changed(self) -> list[tuple[str, Any, Any]]:
        """Return the attributes that have changed since, as `(name, old, new)`; None: it was not, or is not, there."""
        return [
            (_joined(path, name), old.get(name), new.get(name))
            for path, child, old in self._before
            for new in [_own(child)]
            for name in {**old, **new}
            if old.get(name) is not new.get(name)
        ]

    def are_same(self) -> bool:
        """Return whether all are as they were."""
        same = all(_identical(old, _own(child)) for _, child, old in self._before)
        return same and not any(snapshot.has_changed() for snapshot in self._containers)

    def put_back(self) -> None:
        """Put all back as they were."""
        for snapshot in self._containers:
            snapshot.restore()
        for _, child, old in self._before:
            new = _own(child)
            if not _identical(old, new):
                for name in new:
                    del vars(child)[name]
                vars(child).update(old)

    def undoing(self) -> Callable[[], None]:
        """Return a function that undoes the changes until now, and no later ones."""
        containers = [snapshot for snapshot in self._containers if snapshot.has_changed()]
        slots = [
            (vars(child), name, old.get(name, _MISSING))
            for _, child, old in self._before
            for new in [_own(child)]
            for name in {**old, **new}
            if old.get(name, _MISSING) is not new.get(name, _MISSING)
        ]

        def undo() -> None:
            for snapshot in containers:
                snapshot.restore()
            for table, name, value in slots:
                table.pop(name, None) if value is _MISSING else table.update({name: value})

        return undo


@contextlib.contextmanager
def attributes_restored(module: nn.Module | None) -> Iterator[None]:
    """Put the attributes of the model, and their items, back after the block."""
    before = Attributes.of(module)
    try:
        yield
    finally:
        before.put_back()


def _own(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; of a loaded bundle, without those internal to its calls."""
    if not isinstance(module, Loaded):
        return vars(module).copy()
    return {name: value for name, value in vars(module).items() if name not in INTERNAL}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two dicts hold the same objects under the same keys, in the same order."""
    return len(one) == len(other) and all(
        key == also and value is same for (key, value), (also, same) in zip(one.items(), other.items(), strict=True)
    )
