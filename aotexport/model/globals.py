"""Restore state outside of the model after a call: globals, classes and cells of its code, memos, generators.

Tracing sees none of it. Tensors that a call stores there for later calls (tables of positions, say) belong to the trace
and are dropped with it. Numbers that the next call would find changed are refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.containers import ItemChange, Snapshot, is_user_class, snapshot
from aotexport.model.source_lines import is_user_file
from aotexport.process.objects import file_of, is_a, namespace_of, text_of
from aotexport.torch_internals.calls import FakeTensor, tree_leaves

_MISSING = object()
_CONTAINERS = (list, dict, set, deque)
_Owner = ModuleType | type
"""What has attributes that code reads by name: a module of Python, or a class."""


@contextlib.contextmanager
def globals_restored(target: Any, module: nn.Module | None) -> Iterator[list[str]]:
    """Undo the changes of the block in globals and classes of the model's code, and in memos there.

    Args:
        target: the traced callable.
        module: the model; None: a function.

    Yields:
        a list that has, after the block, what it stored, and where: "a tensor in `cache`". Numbers are in it where none
        was before.

    Raises:
        ExportFailed: the block changed a number in a global or class, or drew from a generator that a bundle does not
            have.
    """
    owners = _owners(target, module)
    put_back = _to_put_back(owners, target)
    generators = _other_generators()
    stored: list[str] = []
    try:
        yield stored
    finally:
        changes = put_back()
        _forget_fakes(owners, module)
    counted = [change.path for change in changes if _is_number(change.old) and not _is_same(change)]
    if counted:
        raise ExportFailed(
            f"the call changes the number `{counted[0]}`, which is in no module, and a bundle has no other Python "
            "state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
    drawn = [name for name, state in _other_generators().items() if state != generators.get(name, state)]
    if drawn:
        raise ExportFailed(
            f"the call draws from {drawn[0]}, and a bundle draws from torch's default generator alone. Draw by torch "
            "(`torch.rand`), or outside of the model, and pass the numbers"
        )
    leaves = [(change.path, leaf) for change in changes for leaf in tree_leaves(change.new)]
    stored += dict.fromkeys(f"a tensor in `{path}`" for path, leaf in leaves if is_a(leaf, torch.Tensor))
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    first = [change.path for change in changes if change.old is None and type(change.new) in numbers]
    stored += dict.fromkeys(f"a number in `{path}`" for path in first)


def globals_to_put_back(target: Any, module: nn.Module | None) -> Callable[[], object]:
    """Return a function that puts globals and classes of the model's code back as they are now.

    See `globals_restored`.
    """
    return _to_put_back(_owners(target, module), target)


def _to_put_back(owners: list[_Owner], target: Any) -> Callable[[], list[ItemChange]]:
    """Return a function that puts back what is in globals, classes and cells as it is now, and returns the changes."""
    before = [(owner, dict(namespace_of(owner))) for owner in owners]
    cells = list(_cells(owners, target))
    named = [(_said(owner, name), value) for owner, table in before for name, value in table.items()]
    named = [(name, value) for name, value in named if name != "__warningregistry__"]  # Python's own.
    named += [(name, value) for name, _, value in cells]
    seen: set[int] = set()
    containers = [found for name, value in named for found in _snapshots(value, name, seen)]

    def put_back() -> list[ItemChange]:
        changes = [change for owner, old in before for change in _restore(owner, old)]
        for name, cell, old in cells:
            if cell.cell_contents is not old:
                changes.append(ItemChange(name, old, cell.cell_contents))
                cell.cell_contents = old
        for container in containers:
            changes += container.changes()
            container.restore()
        return changes

    return put_back


def _snapshots(value: Any, path: str, seen: set[int]) -> Iterator[Snapshot]:
    """Yield a snapshot of a container that is not in `seen`, and of the containers in it."""
    found = None if id(value) in seen else snapshot(value, path)
    if found is not None:
        seen.add(id(value))
        yield found
        for key, item in list(found.items.items() if isinstance(found.items, dict) else enumerate(found.items)):
            if is_a(item, *_CONTAINERS):
                yield from _snapshots(item, f"{path}[{text_of(key)}]", seen)


def _owners(target: Any, module: nn.Module | None) -> list[_Owner]:
    """Return the modules of Python of the user's files that define the model's classes, or the function; and these."""
    classes = {base for child in module.modules() for base in type(child).__mro__} if module is not None else set()
    names = {type(child).__module__ for child in module.modules()} if module is not None else set()
    names.add(getattr(target, "__module__", None) or type(target).__module__)
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    files = [owner for owner in found if is_user_file(file_of(owner) or "<built-in>")]
    return [*files, *filter(is_user_class, classes)]


def _said(owner: _Owner, name: str) -> str:
    """Return the name of a global, or of an attribute of a class, as the user knows it."""
    return f"{owner.__name__}.{name}" if is_a(owner, type) else name


def _cells(owners: list[_Owner], target: Any) -> Iterator[tuple[str, CellType, Any]]:
    """Yield the variables of outer functions that the code of methods, or of the function, can change; with values."""
    functions = [value for owner in owners if is_a(owner, type) for value in vars(owner).values()]
    for function in (*functions, target):
        if is_a(function, FunctionType):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # It has no value yet.
                    yield name, cell, cell.cell_contents


def _restore(owner: _Owner, old: dict[str, Any]) -> Iterator[ItemChange]:
    """Restore attributes, and yield the changes; a class that had none of a name has inherited it."""
    now = dict(namespace_of(owner))
    for name in {**old, **now}:
        if now.get(name, _MISSING) is not old.get(name, _MISSING):
            if name in old:
                setattr(owner, name, old[name])
            else:
                delattr(owner, name)
            yield ItemChange(_said(owner, name), inspect.getattr_static(owner, name, None), now.get(name))


def _is_same(change: ItemChange) -> bool:
    return _is_number(change.new) and change.new == change.old


def _is_number(value: Any) -> bool:
    # Truth values are flags (a warning was given); the recorded calls show whether they matter.
    return type(value) in (int, float)


def _other_generators() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators."""
    states: dict[str, Any] = {"Python's `random`": random.getstate()}
    if "numpy" in sys.modules:
        kind, key, *rest = sys.modules["numpy"].random.get_state()
        states["NumPy's `random`"] = (kind, key.tobytes(), *rest)
    return states


def _forget_fakes(owners: list[_Owner], module: nn.Module | None) -> None:
    """Empty the memos (`functools.lru_cache`) that hold tensors of a trace, which have no values."""
    classes = {base for child in module.modules() for base in type(child).__mro__} if module is not None else set()
    defined = [value for owner in owners for value in namespace_of(owner).values() if is_a(value, type)]
    for owner in {id(owner): owner for owner in (*owners, *classes, *defined)}.values():
        for value in list(namespace_of(owner).values()):
            memo = value.__func__ if is_a(value, staticmethod, classmethod, MethodType) else value
            if is_a(memo, functools._lru_cache_wrapper) and _holds_fake(gc.get_referents(memo), depth=4):
                memo.cache_clear()


def _holds_fake(values: Any, depth: int) -> bool:
    if depth == 0:
        return False
    return any(
        is_a(value, FakeTensor) or (is_a(value, dict, list, tuple) and _holds_fake(gc.get_referents(value), depth - 1))
        for value in values
    )
