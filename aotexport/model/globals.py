"""Restore state outside of the model after a call: globals of its code, memos, generators other than torch's.

Tracing sees none of it. Tensors that a call stores there for later calls (tables of positions, say) belong to the trace
and are dropped with it. Numbers that the next call would find changed are refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.containers import Snapshot, snapshot
from aotexport.model.source_lines import is_user_file
from aotexport.torch_internals.calls import FakeTensor

_MISSING = object()


@contextlib.contextmanager
def globals_restored(target: Any, module: nn.Module | None) -> Iterator[None]:
    """Undo the changes of the block in globals of the model's code, and in memos there.

    Args:
        target: the traced callable.
        module: the model; None: a function.

    Raises:
        ExportFailed: the block changed a number in a global, or drew from a generator that a bundle does not have.
    """
    tables = _globals(target, module)
    put_back = _to_put_back(tables)
    generators = _other_generators()
    try:
        yield
    finally:
        counted = put_back()
        _forget_fakes(tables, module)
    if counted:
        raise ExportFailed(
            f"the call changes the global `{counted[0]}`, and a bundle has no Python state. Keep it as a buffer "
            "(`register_buffer`) and change it in place, or outside of the call"
        )
    drawn = [name for name, state in _other_generators().items() if state != generators.get(name, state)]
    if drawn:
        raise ExportFailed(
            f"the call draws from {drawn[0]}, and a bundle draws from torch's default generator alone. Draw by torch "
            "(`torch.rand`), or outside of the model, and pass the numbers"
        )


def globals_to_put_back(target: Any, module: nn.Module | None) -> Callable[[], object]:
    """Return a function that puts globals of the model's code back as they are now; see `globals_restored`."""
    return _to_put_back(_globals(target, module))


def _to_put_back(tables: list[dict[str, Any]]) -> Callable[[], list[str]]:
    """Return a function that puts globals back as they are now, and returns the names of changed numbers."""
    before = [(table, dict(table)) for table in tables]
    containers = [found for table in tables for name, value in table.items() if (found := snapshot(value, name))]

    def put_back() -> list[str]:
        counted = [name for table, old in before for name in _restore(table, old)]
        return counted + [path for container in containers for path in _restore_items(container)]

    return put_back


def _globals(target: Any, module: nn.Module | None) -> list[dict[str, Any]]:
    """Return the globals of the user's files that define the model's classes, or the function."""
    owners = {type(child).__module__ for child in module.modules()} if module is not None else set()
    owners.add(getattr(target, "__module__", None) or type(target).__module__)
    found = [sys.modules[name] for name in sorted(owners) if name in sys.modules]
    return [vars(owner) for owner in found if is_user_file(getattr(owner, "__file__", None) or "<built-in>")]


def _restore(table: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Restore the values of globals; return the names of changed numbers."""
    changed = [name for name in {**old, **table} if table.get(name, _MISSING) is not old.get(name, _MISSING)]
    counted = [name for name in changed if _is_number(old.get(name)) and table.get(name) != old[name]]
    for name in changed:
        if name in old:
            table[name] = old[name]
        else:
            del table[name]
    return counted


def _restore_items(container: Snapshot) -> list[str]:
    counted = [change.path for change in container.changes() if _is_number(change.old)]
    container.restore()
    return counted


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


def _forget_fakes(tables: list[dict[str, Any]], module: nn.Module | None) -> None:
    """Empty the memos (`functools.lru_cache`) that hold tensors of a trace, which have no values."""
    classes = {base for child in module.modules() for base in type(child).__mro__} if module is not None else set()
    classes |= {value for table in tables for value in table.values() if isinstance(value, type)}
    for table in (*tables, *map(vars, classes)):
        for value in table.values():
            memo = getattr(value, "__func__", value)
            if isinstance(memo, functools._lru_cache_wrapper) and _holds_fake(gc.get_referents(memo), depth=4):
                memo.cache_clear()


def _holds_fake(values: Any, depth: int) -> bool:
    if depth == 0:
        return False
    return any(
        isinstance(value, FakeTensor)
        or (isinstance(value, dict) and _holds_fake(value.values(), depth - 1))
        or (isinstance(value, list | tuple) and _holds_fake(value, depth - 1))
        for value in values
    )
