"""Tables of a loaded module: they report changes, and hold its tensors and submodules at their current places."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.submodules.adapter import Adapter
from aotexport_runtime.values.subclasses import is_wrapper

TensorKind = tuple[torch.dtype, torch.Size, type | None]
"""Dtype, shape, and the class of a tensor that wraps others."""

STATE = ("_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TABLES = (*STATE, "_modules", *HOOKS)

WRAP = (
    "Hold the loaded module and new layers in a module of your own, and export that "
    "(`aotexport.export(wrapper, ...)`) where one bundle shall hold both"
)


@dataclass
class Origin:
    """The state of a module, at a path of the whole, when it was loaded; the whole's method `changed` hears of changes.

    Attributes:
        known: whether its class is one of torch's, so that it can be called alone.
        attributes: of such a class: its attributes beside tensors and submodules.
        tensors: kinds of its parameters and buffers, by name.
        left: names of tensors that calls have put there since.
        in_eval: whether it stays in eval mode in training, as at export.
    """

    whole: Any
    path: str
    known: bool = False
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    type: type[nn.Module] = nn.Module  # pyrefly: ignore[invalid-annotation]
    tensors: dict[str, TensorKind] = field(default_factory=dict[str, TensorKind])
    submodules: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    left: set[str] = field(default_factory=set[str])
    in_eval: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        submodules = {name: copy.deepcopy(module, memo) for name, module in self.submodules.items()}
        return dataclasses.replace(self, whole=memo[id(self.whole)], submodules=submodules, left={*self.left})


def are_all_hooked() -> bool:
    """Return whether hooks of all modules are set: the question that each call of a module asks of torch's tables."""
    forward = all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks
    return bool(forward or all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks)


class _ObservedTable:
    """Mixed into the dicts that hold a module's tensors, submodules and hooks.

    Replacing a tensor by one of the same kind is no change: calls read the current one. Nor is what calls put there
    (`put_quietly`). `owner`: the attributes of the module; empty: nobody hears of changes.
    """

    owner: Mapping[str, Any] = MappingProxyType({})

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.get(key)  # type: ignore[attr-defined]
        if self.owner and key not in self:  # type: ignore[operator]
            self.check_added(self.owner["_origin"], key, value)
        super().__setitem__(key, value)  # type: ignore[misc]
        both = isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)
        is_alike = kind_in(self.owner, before) == kind_in(self.owner, value) if both else before is value
        if self.owner and before is not value:
            self.owner["_origin"].whole.__dict__["_loaded"].puts += 1
        if self.owner and not is_alike:
            self.owner["_origin"].left.discard(key)
            self.owner["_origin"].whole.changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)  # type: ignore[misc]
        if self.owner:
            self.owner["_origin"].whole.__dict__["_loaded"].puts += 1
            self.owner["_origin"].whole.changed()

    def check_added(self, origin: Origin, name: Any, added: Any) -> None:
        """Refuse a new entry that no call could use (`NotSupported`)."""

    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> Any:
        self.update(other)  # pyrefly: ignore[no-matching-overload]
        return self


class TensorTable(_ObservedTable, dict[str, Any]):  # type: ignore[misc]
    """Parameters or buffers of a module."""


class HookTable(_ObservedTable, OrderedDict[int, Any]):  # type: ignore[misc]
    """Hooks of a module."""


class SubmoduleTable(_ObservedTable, dict[str, Any]):  # type: ignore[misc]
    """Submodules of a module."""

    def check_added(self, origin: Origin, name: Any, added: Any) -> None:
        grows = name == "parametrizations" or (origin.known and issubclass(origin.type, nn.Sequential))
        if name not in origin.submodules and not grows and not isinstance(added, Adapter):
            raise NotSupported(
                f"`{named(origin.path, name)}` was not there at export, so no call would use the added submodule. "
                f"{WRAP}"
            )


def kind_in(owner: Mapping[str, Any], tensor: torch.Tensor) -> TensorKind:
    """Return the facts about a tensor that calls depend on, beside its values; `owner`: attributes of its module."""
    return tensor.dtype, tensor.shape, type(tensor) if is_wrapper(tensor) and not _shards(owner) else None


def former_kind(table: Mapping[str, Any], name: str) -> TensorKind | None:
    """Return the kind of a loaded tensor that was replaced by one of another kind; None: it was not."""
    if not isinstance(table, TensorTable) or (tensor := table.get(name)) is None:
        return None
    origin: Origin = table.owner["_origin"]
    loaded = None if name in origin.left else origin.tensors.get(name)
    return None if loaded == kind_in(table.owner, tensor) else loaded


def put_quietly(table: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Put a tensor into a table as a call does: what has another kind then is no change of the caller's."""
    dict.__setitem__(table, name, tensor)
    if isinstance(table, TensorTable):
        table.owner["_origin"].left.add(name)
        table.owner["_origin"].whole.__dict__["_loaded"].puts += 1


def is_sharded(table: Mapping[str, Any]) -> bool:
    """Return whether tensors of a table are whole in calls alone: `fully_shard` keeps a part of each between them."""
    return _shards(getattr(table, "owner", {}))


def _shards(owner: Mapping[str, Any]) -> bool:
    return bool(owner.get("_is_fsdp_managed_module"))


def seal(module: nn.Module) -> None:
    """Record the current state of a module as the loaded one, and report changes from now on."""
    origin: Origin = module.__dict__["_origin"]
    origin.type = type(module)
    tensors = {**module._parameters, **module._buffers}
    origin.tensors = {name: kind_in(module.__dict__, each) for name, each in tensors.items() if each is not None}
    origin.submodules = {name: child for name, child in module._modules.items() if child is not None}
    watch_tables(module)


def watch_tables(module: nn.Module) -> None:
    """Make the tables of a module report changes."""
    kinds = {**dict.fromkeys(STATE, TensorTable), "_modules": SubmoduleTable}
    for name in TABLES:
        table = module.__dict__[name] = kinds.get(name, HookTable)(module.__dict__[name])
        table.owner = module.__dict__


StateSlot = tuple[dict[str, Any], str]
"""The table, and the key in it, that hold the current tensor of a name."""


class LoadedState:
    """The state tensors of a load, and whether a module still has them as they were then.

    Attributes:
        tensors: each with its version then, by name; none of inference mode, which have no versions.
        puts: how often tables of the module have got an entry, or lost one; whoever counts has written before.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        find: Callable[[str], StateSlot | None] | None = None,
        ties: Mapping[str, Sequence[str]] = MappingProxyType({}),
        one: torch.Tensor | None = None,
    ) -> None:
        """Note tensors by name; `find` returns their slots (None: nobody asks), `ties` has the other names of each.

        `one` is any tensor whose version counts the writes to all of them; None: each has its own.
        """
        own = {name: tensor for name, tensor in tensors.items() if not tensor.is_inference()}
        self.tensors = {name: (tensor, tensor._version) for name, tensor in own.items()}
        self.puts = 0
        self._find, self._ties = find, ties
        self._read = [*own.values()] if one is None else [one]
        self._versions = [*map(_version, self._read)]
        self._known: tuple[int, bool, list[tuple[StateSlot, torch.Tensor]]] = (-1, False, [])

    def hold(self) -> bool:
        """Return whether every slot has its tensor of the load, which nobody has written to."""
        asked, holds, untold = self._known
        if (find := self._find) is not None and asked != (asked := self.puts):
            names = [(each, tensor) for name, (tensor, _) in self.tensors.items() for each in (name, *self._ties[name])]
            slots = [(slot, tensor) for name, tensor in names if (slot := find(name)) is not None]
            holds = len(slots) == len(names) and all(table.get(key) is tensor for (table, key), tensor in slots)
            untold = [each for each in slots if not isinstance(each[0][0], TensorTable)]
            self._known = asked, holds, untold
        holds = holds and list(map(_version, self._read)) == self._versions
        return holds and (not untold or all(table.get(key) is tensor for (table, key), tensor in untold))


_version = attrgetter("_version")


def of_one_version(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Put tensors of one version counter in the place of tensors nobody has yet; return one that has it too.

    A write to any of them then counts as one to each: autograd would refuse it between forward and backward. None: a
    tensor has no memory of processors' plain kind, and they are left.
    """
    one = torch.empty(0)
    if any(type(each) is not torch.Tensor or each.is_inference() or not _is_plain(each) for each in tensors.values()):
        return None
    shared: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in shared:
            shared[id(tensor)] = one.detach()
            shared[id(tensor)].data = tensor
        tensors[name] = shared[id(tensor)]
    return one


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


class Computed(dict[str, Any]):
    """A table of tensors that a module computes on access: parametrized, pruned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the current tensor."""
        return getattr(self._module, name, default)


def is_below(name: str, path: str) -> bool:
    """Return whether `name` lies below the submodule at `path`."""
    return name.startswith(f"{path}.")


def named(path: str, tensor: str) -> str:
    """Return the name of a tensor of the module at `path`."""
    return f"{path}.{tensor}" if path else tensor


def module_at(whole: nn.Module, path: str) -> nn.Module | None:
    """Return the module at `path` below `whole`; None: there is none."""
    module: nn.Module | None = whole
    for part in path.split(".") if path else ():
        module = None if module is None else module._modules.get(part)
    return module


def slot_of(whole: nn.Module, name: str) -> StateSlot | None:
    """Return the slot of the tensor `name` below `whole`; None: there is none."""
    path, _, leaf = name.rpartition(".")
    owner = module_at(whole, path)
    if owner is None:
        return None
    for table in (owner._parameters, owner._buffers):
        if leaf in table:
            return table, leaf
    # Without asking for the tensor: a parametrization may draw random numbers, or count how often it computes one.
    is_there = leaf in owner.__dict__ or hasattr(type(owner), leaf)
    return (Computed(owner), leaf) if is_there else None
