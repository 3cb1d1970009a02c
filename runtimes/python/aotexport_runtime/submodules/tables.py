"""Tables of a module that report changes."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from aotexport_runtime.values.subclasses import is_wrapper

TensorKind = tuple[torch.dtype, torch.Size, type | None]
"""Dtype, shape, and the class of a tensor that wraps others."""

STATE = ("_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _ObservedTable:
    """Mixed into the dicts that hold a module's tensors, submodules and hooks.

    Replacing a tensor by one of the same kind is no change: calls read the current one. Nor is what calls put there
    (`put_quietly`).

    Attributes:
        loaded: kinds of the tensors of the loaded module.
        left: names of tensors that calls put there.
    """

    changed: Callable[[], None] | None = None
    check: Callable[[str, Any], None] | None = None
    owner: Mapping[str, Any] = MappingProxyType({})
    loaded: Mapping[str, TensorKind] = MappingProxyType({})
    left: AbstractSet[str] = frozenset()

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.get(key)  # type: ignore[attr-defined]
        if self.check is not None and key not in self:  # type: ignore[operator]
            self.check(key, value)
        super().__setitem__(key, value)  # type: ignore[misc]
        if self.changed is not None and not _alike(self.owner, before, value):
            self.left -= {key}
            self.changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)  # type: ignore[misc]
        if self.changed is not None:
            self.changed()

    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


class ModuleTable(_ObservedTable, dict[str, Any]):  # type: ignore[misc]
    """Parameters, buffers or submodules of a module."""


class HookTable(_ObservedTable, OrderedDict[int, Any]):  # type: ignore[misc]
    """Hooks of a module."""


def _alike(owner: Mapping[str, Any], before: Any, value: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return kind_in(owner, before) == kind_in(owner, value)
    return before is value


def kind_in(owner: Mapping[str, Any], tensor: torch.Tensor) -> TensorKind:
    """Return the facts about a tensor that calls depend on, beside its values; `owner`: attributes of its module."""
    return tensor.dtype, tensor.shape, type(tensor) if is_wrapper(tensor) and not _shards(owner) else None


def former_kind(table: Mapping[str, Any], name: str) -> TensorKind | None:
    """Return the kind of a loaded tensor that was replaced by one of another kind; None: it was not."""
    if not isinstance(table, ModuleTable) or name in table.left or (tensor := table.get(name)) is None:
        return None
    loaded = table.loaded.get(name)
    return None if loaded == kind_in(table.owner, tensor) else loaded


def put_quietly(table: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Put a tensor into a table as a call does: what has another kind then is no change of the caller's."""
    dict.__setitem__(table, name, tensor)
    if isinstance(table, ModuleTable) and name not in table.left:
        table.left |= {name}


def is_sharded(table: Mapping[str, Any]) -> bool:
    """Return whether tensors of a table are whole in calls alone: `fully_shard` keeps a part of each between them."""
    return _shards(getattr(table, "owner", {}))


def _shards(owner: Mapping[str, Any]) -> bool:
    return bool(owner.get("_is_fsdp_managed_module"))


def refill(module: nn.Module, name: str, entries: Any) -> None:
    """Replace the entries of a module's table, in place of setting another table."""
    table = module.__dict__[name]
    new_entries = dict(entries)
    table.clear()
    table.update(new_entries)


def watch_tables(module: nn.Module, changed: Callable[[], None], check: Callable[[str, Any], None]) -> None:
    """Make the tables of a module call `changed` after a change, and `check` before a new submodule is added."""
    for name in (*STATE, "_modules", *HOOKS):
        table = (HookTable if name in HOOKS else ModuleTable)(module.__dict__[name])
        table.changed, table.owner = changed, module.__dict__
        if name in STATE:
            tensors: dict[str, TensorKind] = {
                str(key): kind_in(table.owner, entry) for key, entry in table.items() if entry is not None
            }
            table.loaded = {**tensors, **getattr(module.__dict__[name], "loaded", {})}
            table.left = getattr(module.__dict__[name], "left", frozenset())
        table.check = check if name == "_modules" else None
        module.__dict__[name] = table
