"""Attributes of the model that a call changes: put back, and noted or refused.

Tracing keeps tensor operators. Python state that a call changes is no operator; a program without it would be silently
wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from aotexport.capture.containers import Change, Snapshot, snapshots
from aotexport.capture.effects import Effects
from aotexport.errors import ExportFailed
from aotexport_runtime.python_state import INTERNAL, WithAttributes

_NUMBERS = (bool, int, float, str)
_TABLE = re.compile(r"\.?_(?:buffers|parameters|modules)\['([^']+)'\]")
_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ChangedOnFirstCall(ExportFailed):
    """The call changed the model as a first call may: once it has run for real, the next need not."""


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
        old: what it was.
        new: what the call made of it.
    """

    def __init__(self, name: str, old: Any, new: Any) -> None:
        super().__init__(
            f"the call changes the attribute `{name}` of the model from {old!r} to {new!r}, and a bundle has no "
            "Python state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
        self.name, self.old, self.new = name, old, new


@contextlib.contextmanager
def attributes_kept(module: nn.Module | None, effects: Effects) -> Iterator[None]:
    """Put the attributes of the model back after the block, and note in `effects` what the bundle does not keep.

    Raises:
        ExportFailed: the block changed Python state that the model's next call may depend on.
    """
    modules = _named_modules(module)
    before = [(path, child, _own(child)) for path, child in modules]
    containers = _containers(modules)
    try:
        yield
    finally:
        items = [change for snapshot in containers for change in snapshot.changes()]
        for snapshot in containers:
            snapshot.restore()
        changes = _restore(before)
    _judge_items(items, effects)
    _judge(changes, effects)


@contextlib.contextmanager
def attributes_restored(module: nn.Module | None) -> Iterator[None]:
    """Put the attributes of the model, and what is in them, back after the block, whatever it did."""
    put_back = attributes_to_put_back(_named_modules(module))
    try:
        yield
    finally:
        put_back()


def attributes_to_put_back(modules: Iterable[tuple[str, nn.Module]]) -> Callable[[], None]:
    """Return what puts the attributes of modules, and what is in them, back as they are now.

    Args:
        modules: each with its path; their parts are not looked at.
    """
    modules = list(modules)
    before = [(path, child, _own(child)) for path, child in modules]
    containers = _containers(modules)

    def put_back() -> None:
        for snapshot in containers:
            snapshot.restore()
        _restore(before)

    return put_back


def _named_modules(module: nn.Module | None) -> list[tuple[str, nn.Module]]:
    return [] if module is None else list(module.named_modules())


def _own(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; of a loaded bundle without what its calls keep for themselves."""
    hidden = INTERNAL if isinstance(module, WithAttributes) else ()
    return {name: value for name, value in vars(module).items() if name not in hidden}


def _containers(modules: Iterable[tuple[str, nn.Module]]) -> list[Snapshot]:
    """Return the containers that the attributes of modules hold, torch's own tables of their state among them."""
    found: list[Snapshot] = []
    for path, child in modules:
        for name, value in _own(child).items():
            found += snapshots(value, f"{path}.{name}" if path else name)
    return found


def _judge_items(changes: list[Change], effects: Effects) -> None:
    for change in changes:
        if any(table in change.path for table in _HOOKS):
            raise ChangedOnFirstCall(
                "the call registers hooks on modules, which a bundle cannot hold. Register them before the export"
            )
        path = _TABLE.sub(r".\1", change.path).lstrip(".")
        attribute = _attribute(change.path)
        if change.is_attribute and attribute is not None:
            effects.stored.append(attribute)
            continue
        if change.old is None and isinstance(change.new, torch.Tensor):
            effects.notes.append(f"the tensor that the call stores in `{path}` is not kept by the bundle")
            if attribute is not None:
                effects.stored.append(attribute)
            continue
        message = (
            f"the call changes `{path}` of the model, and a bundle has no Python state. Keep tensors as "
            "buffers (`register_buffer`) and change them in place; count and collect outside of the call"
        )
        if attribute is None:
            raise ExportFailed(message)
        raise PythonStateChanged([*(a for other in changes if (a := _attribute(other.path))), *effects.stored], message)


def _attribute(path: str) -> str | None:
    """Return the path of the attribute, or buffer, that a change of an item is of; None: one of torch's tables."""
    table = re.match(r"(.*?)\.?_buffers\['([^']+)'\]$", path)
    if table is not None:
        return ".".join(filter(None, table.groups()))
    name = path.partition("[")[0]
    return None if name.rpartition(".")[2] in _BASE_ATTRIBUTES else name


def _restore(before: list[tuple[str, nn.Module, dict[str, Any]]]) -> list[tuple[str, Any, Any]]:
    """Put every attribute back; return the changed ones as `(name, old, new)`."""
    changes: list[tuple[str, Any, Any]] = []
    for path, child, old in before:
        new = _own(child)
        for key in {**old, **new}:
            if old.get(key) is not new.get(key):
                changes.append((f"{path}.{key}" if path else key, old.get(key), new.get(key)))
        for key in new:
            del vars(child)[key]
        vars(child).update(old)
    return changes


def _judge(changes: list[tuple[str, Any, Any]], effects: Effects) -> None:
    for name, old, new in changes:
        if isinstance(new, _NUMBERS) and type(old) is type(new) and old != new:
            raise AttributeChanged(name, old, new)
        if name.rpartition(".")[2] not in _BASE_ATTRIBUTES:
            effects.stored.append(name)
        if isinstance(new, torch.Tensor) and not isinstance(old, torch.Tensor):
            effects.notes.append(f"the tensor that the call stores in `{name}` is not kept by the bundle")
