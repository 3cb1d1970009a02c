"""Submodules of a loaded bundle: they hold its state, have their original names, and tell of every change.

A call of a bundle runs a graph, and no submodule's code. Whatever changes a submodule otherwise than in the values of
its tensors so reaches calls only because its tables tell of it: the graphs are composed anew then, with calls of the
submodules that changed (`call/submodules.py`). A change that no call can follow is refused.
"""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.python_state import Kept, WithAttributes

STATE = ("_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

WRAP = (
    "Hold the loaded module and new layers in a module of your own, and export that "
    "(`aotexport.export(wrapper, ...)`) where one bundle shall hold both"
)

# --- tables that tell of changes --------------------------------------------------------------------------


class _Telling:
    """Mixed into the dicts that a module keeps tensors, submodules and hooks in.

    Setting a tensor in the place of one of the same dtype and shape is no change: calls read it by themselves.
    """

    changed: Callable[[], None] | None = None
    check: Callable[[str, Any], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.get(key)  # type: ignore[attr-defined]
        if self.check is not None and key not in self:  # type: ignore[operator]
            self.check(key, value)
        super().__setitem__(key, value)  # type: ignore[misc]
        if self.changed is not None and not _alike(before, value):
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


class Table(_Telling, dict[str, Any]):  # type: ignore[misc]
    """Parameters, buffers or submodules of a module."""


class HookTable(_Telling, OrderedDict[int, Any]):  # type: ignore[misc]
    """Hooks of a module."""


def _alike(before: Any, value: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return before.dtype == value.dtype and before.shape == value.shape
    return before is value


def told(module: nn.Module, changed: Callable[[], None], check: Callable[[str, Any], None] | None = None) -> None:
    """Make the tables of a module tell of changes.

    Args:
        module: changed in place.
        changed: called after each change.
        check: called with name and module before a submodule is added; may refuse.
    """
    for name in (*STATE, "_modules", *HOOKS):
        table = (HookTable if name in HOOKS else Table)(module.__dict__[name])
        table.changed = changed
        table.check = check if name == "_modules" else None
        module.__dict__[name] = table


# --- submodules -------------------------------------------------------------------------------------------


@dataclass
class Origin:
    """What a submodule was when it was loaded.

    Attributes:
        path: its path.
        type: its class.
        changed: to be called when it changes.
        known: whether its class is one of torch's, so that it can be called alone.
        attributes: of such a class: its attributes beside tensors and submodules.
        tensors: dtype and shape of its parameters and buffers, by name.
        submodules: its submodules, by name.
    """

    path: str
    type: type[nn.Module]
    changed: Callable[[], None]
    known: bool = False
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict[str, Any])
    submodules: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])


class Submodule(WithAttributes):
    """Stands where the original had a submodule."""

    def __init__(self, origin: Origin) -> None:
        """Begin without state.

        Args:
            origin: its path, and whom to tell of changes; completed by `seal`.
        """
        nn.Module.__init__(self)
        self.__dict__["_origin"] = origin

    def seal(self) -> None:
        """Take what the submodule is now for what was loaded, and tell of changes from now on."""
        origin: Origin = self.__dict__["_origin"]
        origin.type = type(self)
        tensors = {**self._parameters, **self._buffers}
        origin.tensors = {name: (t.dtype, t.shape) for name, t in tensors.items() if t is not None}
        origin.submodules = {name: module for name, module in self._modules.items() if module is not None}
        told(self, origin.changed, self._check_added)

    def _check_added(self, name: str, module: Any) -> None:
        origin: Origin = self.__dict__["_origin"]
        if (
            name in origin.submodules
            or name == "parametrizations"
            or (origin.known and isinstance(self, nn.Sequential))
        ):
            return
        raise NotSupported(
            f"`{origin.path}.{name}` was not there at export, so no call would use the added submodule. {WRAP}"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the original did at this place of the program that is running.

        Raises:
            NotSupported: the submodule is called by itself, and is of a class of the model's.
        """
        origin: Origin = self.__dict__["_origin"]
        part = running_parts().get(id(self))
        if part is not None:
            return part(*args, **kwargs)
        if origin.known:
            return super().forward(*args, **kwargs)  # type: ignore[misc] (the class of torch comes next)
        raise NotSupported(
            f"`{origin.path}` cannot be called by itself: a bundle holds the program of the whole module, and the "
            "class of this submodule is the model's own. Register a forward hook on it to see what it takes and "
            "returns, or export it alone"
        )

    def stands_for(self) -> type[nn.Module]:
        """Return the class of torch's that the submodule is of; of other classes its own."""
        bases = (base for base in type(self).__mro__ if base.__module__.startswith("torch.nn.modules"))
        return next(bases) if self.__dict__["_origin"].known else type(self)

    def attributes_changed(self) -> str | None:
        """Return the name of an attribute that is not what was loaded; only of torch's classes."""
        origin: Origin = self.__dict__["_origin"]
        missing = object()
        for name, value in origin.attributes.items():
            now = self.__dict__.get(name, missing)
            if type(now) is not type(value) or now != value:
                return name
        return None

    def reshaped(self) -> str | None:
        """Return the name of a parameter or buffer that has another dtype or shape than what was loaded."""
        origin: Origin = self.__dict__["_origin"]
        for name, expected in origin.tensors.items():
            tensor = self._parameters.get(name, self._buffers.get(name))
            if tensor is not None and (tensor.dtype, tensor.shape) != expected:
                return name
        return None

    def train(self, mode: bool = True) -> Submodule:
        """Switch the mode of a submodule alone, where its class is one of torch's.

        Raises:
            NotSupported: the class is the model's own, or it holds such a submodule.
        """
        origin: Origin = self.__dict__["_origin"]
        if mode != origin.changed.__self__.training:  # type: ignore[attr-defined] (a method of the whole)
            for module in self.modules():
                if isinstance(module, Submodule):
                    module.check_mode()
        for module in self.modules():
            module.__dict__["training"] = mode
        origin.changed()
        return self

    def check_mode(self) -> None:
        """Refuse a mode of its own for a submodule of a class of the model's.

        Raises:
            NotSupported: it is one, and runs code in calls.
        """
        origin: Origin = self.__dict__["_origin"]
        if not origin.known:
            raise NotSupported(
                f"`{origin.path}` cannot be switched alone: a bundle holds the programs of the whole module. Switch it "
                "before the export, which keeps such a mixture, or export the program `eval-joint`"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a tensor, a submodule, or an attribute that calls look at.

        Raises:
            NotSupported: no call looks at the attribute.
        """
        origin: Origin = self.__dict__["_origin"]
        if name == "training":
            self.train(value)
        elif name in (*STATE, "_modules", *HOOKS):
            table = self.__dict__[name]
            table.clear()
            table.update(value)
        elif name == "__class__":
            _check_class(self, value, origin.path)
            super().__setattr__(name, value)
            origin.changed()
        elif isinstance(value, nn.Module | torch.Tensor) or self._is_looked_at(name):
            super().__setattr__(name, value)
            origin.changed()
        elif name.startswith("_") or name in self._parameters or name in self._buffers or name in self._modules:
            super().__setattr__(name, value)
        else:
            raise NotSupported(
                f"no call looks at the attribute `{name}` of `{origin.path}`: what the model's code read of it was "
                "fixed at export. Set it before the export"
            )

    def __delattr__(self, name: str) -> None:
        """Delete a tensor, a submodule or an attribute."""
        super().__delattr__(name)
        self.__dict__["_origin"].changed()

    def _is_looked_at(self, name: str) -> bool:
        """Return whether calls look at an attribute that is no tensor and no submodule."""
        origin: Origin = self.__dict__["_origin"]
        kept: Kept | None = self.__dict__.get("_kept")
        if name == "forward" or name in origin.tensors or name in origin.attributes:
            return True
        return (kept is not None and name in kept) or isinstance(getattr(type(self), name, None), property)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy: as a part of the copied whole, or alone, as a plain module of torch's class."""
        origin: Origin = self.__dict__["_origin"]
        if id(origin.changed.__self__) in memo:  # type: ignore[attr-defined] (a method of the whole)
            return copied_submodule(self, memo)
        if not origin.known:
            raise NotSupported(
                f"`{origin.path}` is a part of a loaded bundle and has no code of its own, so it cannot be copied "
                "alone. Copy the whole module"
            )
        plain = self.stands_for().__new__(self.stands_for())
        memo[id(self)] = plain
        nn.Module.__init__(plain)
        for name, value in self.__dict__.items():
            if name in (*STATE, "_modules", *HOOKS):
                plain.__dict__[name].update(copy.deepcopy(dict(value), memo))
            elif name not in ("_origin", "_kept"):
                plain.__dict__[name] = copy.deepcopy(value, memo)
        return plain

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported(
            f"`{self.__dict__['_origin'].path}` is a part of a loaded bundle, which is not pickled. Save the whole "
            "with `aotexport_runtime.save(module, path)`, or weights with `state_dict()`"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_replicas()


def refuse_replicas() -> NoReturn:
    """Refuse `nn.DataParallel` on several devices.

    Raises:
        NotSupported: always.
    """
    raise NotSupported(
        "torch.nn.DataParallel runs copies of a module's attributes, which a loaded bundle does not read. Use "
        "torch.nn.parallel.DistributedDataParallel, one process per device"
    )


def _check_class(module: nn.Module, value: Any, path: str) -> None:
    if not (isinstance(value, type) and issubclass(value, type(module))):
        name = getattr(value, "__qualname__", value)
        what = f"`{path}`" if path else "the loaded module"
        raise NotSupported(
            f"{what} cannot become a `{name}`, only an object of a subclass of `{type(module).__name__}`"
        )


def check_class(module: nn.Module, value: Any) -> None:
    """Refuse a class for the whole module that is no subclass of the one it has.

    Raises:
        NotSupported: it is none.
    """
    _check_class(module, value, "")


@cache
def known_class(name: str) -> type[Submodule]:
    """Return the class of submodules that are of a class of `torch.nn`."""
    bases = (Submodule, *([_Sliced] if name in ("Sequential", "ModuleList") else []), getattr(nn, name))
    return type(name, bases, {"__module__": Submodule.__module__})


class _Sliced:
    """Mixed into lists of modules: a slice is a plain list of the same modules."""

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)  # type: ignore[misc]
        modules = [*self._modules.values()][index]  # type: ignore[attr-defined]
        return nn.Sequential(*modules) if isinstance(self, nn.Sequential) else nn.ModuleList(modules)


def copied_submodule(module: Submodule, memo: dict[int, Any]) -> nn.Module:
    """Return the copy of a submodule in a copied whole, which `memo` has."""
    twin = memo[id(module)] = type(module).__new__(type(module))
    for name, value in module.__dict__.items():
        if name == "_origin":
            twin.__dict__[name] = copied_origin(value, memo)
        elif name not in (*STATE, "_modules", *HOOKS, "_kept"):
            twin.__dict__[name] = copy.deepcopy(value, memo)
    copy_tables(module, twin, memo)
    return twin


def copy_tables(module: Any, twin: Any, memo: dict[int, Any]) -> None:
    """Give `twin` copies of what is in the tables of `module`."""
    for name in (*STATE, "_modules", *HOOKS):
        table: Any = module.__dict__[name]
        twin.__dict__[name] = type(table)()
        twin.__dict__[name].update({key: copy.deepcopy(entry, memo) for key, entry in table.items()})
    told(twin, twin.__dict__["_origin"].changed, twin._check_added)


def copied_origin(origin: Origin, memo: dict[int, Any]) -> Origin:
    """Return what a copied submodule was when it was loaded; `memo` has the copied whole."""
    whole = memo[id(origin.changed.__self__)]  # type: ignore[attr-defined] (a method of the whole)
    submodules = {name: copy.deepcopy(module, memo) for name, module in origin.submodules.items()}
    return dataclasses.replace(origin, changed=whole.changed, submodules=submodules)


# --- parts of running programs ----------------------------------------------------------------------------

_RUNNING = threading.local()


def running_parts() -> dict[int, Callable[..., Any]]:
    """Return what submodules do in the call that this thread is running, by `id`."""
    try:
        return _RUNNING.parts
    except AttributeError:
        _RUNNING.parts = {}
        return _RUNNING.parts


@contextmanager
def running(module: nn.Module, part: Callable[..., Any]) -> Generator[None, None, None]:
    """Let `module` do what `part` does when it is called."""
    parts = running_parts()
    before = parts.get(id(module))
    parts[id(module)] = part
    try:
        yield
    finally:
        if before is None:
            del parts[id(module)]
        else:
            parts[id(module)] = before


# --- what changed -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A submodule that is no longer what was loaded.

    Attributes:
        path: its path.
        module: what stands there now; None: nothing.
        how: what changed, as the rest of a sentence that begins with the path.
        keeps_state: whether its parameters, buffers and submodules are those that were loaded.
        runs_part: whether it still does what the original did, on what it is given and holds now.
        needs_call: whether only a call of the submodule can follow the change.
        computes_state: whether nothing changed but how its tensors come about.
    """

    path: str
    module: nn.Module | None
    how: str
    keeps_state: bool = False
    runs_part: bool = False
    needs_call: bool = False
    computes_state: bool = False


def changes_below(module: nn.Module, origin: Origin, mode: bool) -> list[Change]:
    """Return the submodules of a loaded module that changed, but for those of submodules that were replaced.

    Args:
        module: the loaded module, or a submodule of it.
        origin: what it was.
        mode: whether the whole is in train mode.

    Raises:
        NotSupported: it has a parameter or buffer that no call would use.
    """
    found: list[Change] = []
    prefix = f"{origin.path}." if origin.path else ""
    for name, child in origin.submodules.items():
        now = module._modules.get(name)
        if now is None:
            found.append(Change(f"{prefix}{name}", None, "was removed"))
        elif now is not child:
            found.append(Change(f"{prefix}{name}", now, f"was replaced by a `{type(now).__name__}`"))
        elif isinstance(now, Submodule):
            own: Origin = now.__dict__["_origin"]
            change = _change(now, own, mode)
            found += [*([] if change is None else [change]), *changes_below(now, own, mode)]
    return found


def _change(module: Submodule, origin: Origin, mode: bool) -> Change | None:
    """Return how a submodule itself changed; None: it did not."""
    path, runs_part = origin.path, not origin.known
    if type(module) is not origin.type:
        computed = "parametrizations" in module._modules
        how = "is parametrized" if computed else "has another class"
        return Change(path, module, how, runs_part=runs_part, computes_state=computed)
    tensors = {**module._parameters, **module._buffers}
    gone = next((name for name in origin.tensors if tensors.get(name) is None), None)
    if gone is not None:
        computed = getattr(module, gone, None) is not None
        how = f"has a `{gone}` that is computed" if computed else f"has no `{gone}` anymore"
        return Change(path, module, how, runs_part=runs_part, computes_state=computed)
    if isinstance(module, nn.Sequential) and module._modules.keys() != origin.submodules.keys():
        return Change(path, module, "has other submodules", needs_call=True)
    reshaped, attribute = module.reshaped(), module.attributes_changed()
    if reshaped is not None:
        return Change(path, module, f"has a `{reshaped}` of another shape or dtype", runs_part=runs_part)
    if attribute is not None:
        return Change(path, module, f"has another `{attribute}`", needs_call=True)
    if "forward" in module.__dict__:
        return Change(path, module, "has another `forward`", keeps_state=True, runs_part=True)
    if module.training != mode and origin.known and not module._modules:
        return Change(path, module, f"is in {'train' if module.training else 'eval'} mode", keeps_state=True)
    if any(module.__dict__[table] for table in HOOKS):
        return Change(path, module, "has hooks", keeps_state=True, runs_part=True)
    check_nothing_added(module, origin)
    return None


def check_nothing_added(module: nn.Module, origin: Origin) -> None:
    """Refuse parameters and buffers that were not there at export, in a module that is otherwise as it was.

    Raises:
        NotSupported: names one.
    """
    for name in (*module._parameters, *module._buffers):
        added = module._parameters.get(name, module._buffers.get(name))
        if added is not None and name not in origin.tensors:
            path = f"{origin.path}.{name}" if origin.path else name
            raise NotSupported(f"`{path}` was not there at export, so no call would use it. {WRAP}")


__all__ = [
    "HOOKS",
    "STATE",
    "WRAP",
    "Change",
    "Origin",
    "Submodule",
    "changes_below",
    "check_class",
    "check_nothing_added",
    "copied_origin",
    "copy_tables",
    "known_class",
    "refuse_replicas",
    "running",
    "told",
]
