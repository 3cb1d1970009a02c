"""Modules in the places of original submodules, and the tree of them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from aotexport_runtime.allowed.modules import KNOWN
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.manifest import Manifest, StateTensor
from aotexport_runtime.schema.manifest import Submodule as Record
from aotexport_runtime.schema.trees import Constant
from aotexport_runtime.submodules.adapter import adapted_call
from aotexport_runtime.submodules.python_state import PythonState
from aotexport_runtime.submodules.tables import HOOKS, TABLES, Origin, StateSlot, former_kind, kind_in, watch_tables
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.trees import builder

_RUNNING: ContextVar[tuple[tuple[nn.Module, Callable[..., Any]], ...]] = ContextVar("running", default=())
"""Submodules in the call that runs, each with the function that its call runs."""


@contextmanager
def running(module: nn.Module, part: Callable[..., Any]) -> Generator[None, None, None]:
    """Let a call of `module` in this thread run `part`."""
    token = _RUNNING.set((*_RUNNING.get(), (module, part)))
    try:
        yield
    finally:
        _RUNNING.reset(token)


class Loaded(nn.Module):
    """A loaded module or submodule, which reads and sets attributes that calls change as the original does."""

    def keep(self, state: PythonState, path: str) -> None:
        """Take the attributes of this module, at `path` of the whole, from `state`."""
        # Bypasses `__setattr__`, which handles the user's names.
        self.__dict__["_own_attributes"] = state, f"{path}." if path else ""

    def kept(self, name: str) -> StateSlot | None:
        """Return the slot of an attribute that calls change; None: it is none of them."""
        state, prefix = self.__dict__.get("_own_attributes", (None, ""))
        return None if state is None or prefix + name not in state.values else (state.values, prefix + name)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that calls change, or a parameter, buffer or submodule."""
        slot = self.kept(name)
        return super().__getattr__(name) if slot is None else slot[0][slot[1]]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a class must be a subclass of the module's (`NotSupported`)."""
        origin: Origin | None = self.__dict__.get("_origin")
        if name == "training":
            self.train(value)
        elif name in TABLES and origin is not None:
            table, entries = self.__dict__[name], dict(value)
            table.clear()
            table.update(entries)
        elif (slot := self.kept(name)) is not None:
            slot[0][slot[1]] = value
        else:
            if name == "__class__" and type(self) not in getattr(value, "__mro__", ()):
                what = f"`{origin.path}`" if origin is not None and origin.path else "the loaded module"
                raise NotSupported(
                    f"{what} cannot become a `{getattr(value, '__qualname__', value)}`, only an object of a subclass "
                    f"of `{type(self).__name__}`"
                )
            if origin is not None and f"{origin.path}.{name}".lstrip(".") in origin.whole.constants:
                raise NotSupported(unread(name, origin.path))
            super().__setattr__(name, value)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise NotSupported(
            "torch.nn.DataParallel runs copies of a module's attributes, which a loaded bundle does not read. Use "
            "torch.nn.parallel.DistributedDataParallel, one process per device"
        )


class LoadedSubmodule(Loaded):
    """A module in the place of an original submodule."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one; or a plain module of torch's class, for code that makes another layer of a layer's class."""
        if not (args or kwargs) or (args and isinstance(args[0], Origin)):
            return super().__new__(cls)
        return next(base for base in cls.__mro__ if base.__module__.startswith("torch.nn.modules"))(*args, **kwargs)

    def __init__(self, origin: Origin) -> None:
        nn.Module.__init__(self)
        self.__dict__["_origin"] = origin

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original's part of the running program, or by itself, the code of torch's class.

        `NotSupported`: its class is the model's own, or torch cannot compute with its weights, which are in uneven
        parts, or have shapes or dtypes that do not fit together.
        """
        origin: Origin = self.__dict__["_origin"]
        part = next((part for module, part in reversed(_RUNNING.get()) if module is self), None)
        if part is not None:
            return part(*args, **kwargs)
        if origin.known:
            try:
                result = super().forward(*args, **kwargs)  # type: ignore[misc] (the class of torch comes next)
            except RuntimeError as error:
                from aotexport_runtime.values.meshes import check_even

                check_even(origin.path, self._parameters, error)
                if (name := self.reshaped()) is not None:
                    raise NotSupported(_unfitting(self, name, error)) from error
                raise
            return adapted_call(self, result, args)
        raise NotSupported(
            f"`{origin.path}` cannot be called by itself: a bundle holds the program of the whole module, and the "
            "class of this submodule is the model's own. Register a forward hook on it to see what it takes and "
            "returns, or export it alone"
        )

    def stands_for(self) -> type[nn.Module]:
        """Return torch's class of the submodule, or its own class, if that is not torch's."""
        bases = (base for base in type(self).__mro__ if base.__module__.startswith("torch.nn.modules"))
        return next(bases) if self.__dict__["_origin"].known else type(self)

    def reshaped(self) -> str | None:
        """Return the name of a parameter or buffer of another kind than the one it replaced; None: there is none."""
        tables = (self._parameters, self._buffers)
        return next((name for table in tables for name in table if former_kind(table, name) is not None), None)

    def train(self, mode: bool = True) -> LoadedSubmodule:
        """Switch the mode of a submodule alone; none in it may have a class of the model's own (`NotSupported`)."""
        origin: Origin = self.__dict__["_origin"]
        parts = [module.__dict__["_origin"] for module in self.modules() if isinstance(module, LoadedSubmodule)]
        own = next((p.path for p in parts if not p.known and mode != (p.whole.training and not p.in_eval)), None)
        if own is not None:
            raise NotSupported(
                f"`{own}` cannot be switched alone: a bundle holds the programs of the whole module. Switch it before "
                "the export, which keeps such a mixture, or export the program `eval-joint`"
            )
        for module in self.modules():
            module.__dict__["training"] = mode
        origin.whole.changed()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a tensor, a submodule, or an attribute that calls read; others are refused (`NotSupported`)."""
        origin: Origin = self.__dict__["_origin"]
        tells = name in self._parameters or name in self._buffers or name in self._modules or name == "training"
        is_seen = isinstance(value, nn.Module | torch.Tensor) or isinstance(getattr(type(self), name, None), property)
        is_seen |= name in ("__class__", "forward", "extra_repr", *origin.tensors, *origin.attributes)
        is_seen |= self.kept(name) is not None
        is_new = not (tells or is_seen or name.startswith("_"))
        # A hook may read what is set on a class of torch's; without one, the next call refuses it.
        if is_new and not origin.known:
            raise NotSupported(unread(name, origin.path))
        super().__setattr__(name, value)
        if is_new or (is_seen and not tells):
            origin.whole.changed()

    def __delattr__(self, name: str) -> None:
        """Delete a tensor, a submodule or an attribute."""
        super().__delattr__(name)
        self.__dict__["_origin"].whole.changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy: as a part of the copied whole, or alone, as a plain module of torch's class."""
        origin: Origin = self.__dict__["_origin"]
        if id(origin.whole) in memo:
            return copied(self, memo)
        if not origin.known:
            raise NotSupported(
                f"`{origin.path}` is a part of a loaded bundle and has no code of its own, so it cannot be copied "
                "alone. Copy the whole module"
            )
        return copied(self, memo, alone=self.stands_for())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported(
            f"`{self.__dict__['_origin'].path}` is a part of a loaded bundle, which is not pickled. Save the whole "
            "with `aotexport_runtime.save(module, path)`, or weights with `state_dict()`"
        )


def unread(name: str, path: str) -> str:
    """Return why a value of an attribute, of the module at a path of the whole, is refused."""
    return (
        f"no call looks at the attribute `{name}` of {f'`{path}`' if path else 'the loaded module'}: what the model's "
        "code read of it was fixed at export. Set it before the export"
    )


def _unfitting(module: LoadedSubmodule, name: str, error: RuntimeError) -> str:
    origin: Origin = module.__dict__["_origin"]
    dtype, shape, _ = kind_in(module.__dict__, getattr(module, name))
    former_dtype, former_shape, _ = origin.tensors[name]
    return (
        f"`{origin.path}.{name}` is {dtypes.name_of(dtype)}{list(shape)} now, and was "
        f"{dtypes.name_of(former_dtype)}{list(former_shape)} when the bundle was loaded: the layer cannot compute "
        f"with it ({error}). Give it the former dtype and shape, set the layer's other tensors too, or replace the "
        "whole layer"
    )


def switch(module: nn.Module, mode: bool) -> None:
    """Switch the mode of a loaded module and its submodules; the user's submodules by their own `train`."""
    # Bypasses `LoadedSubmodule.__setattr__`, which keeps the mode of the whole.
    module.__dict__["training"] = mode and not module.__dict__["_origin"].in_eval
    for child in module.children():
        switch(child, mode) if isinstance(child, LoadedSubmodule) else child.train(mode)


@cache
def known_class(name: str) -> type[LoadedSubmodule]:
    """Return the class of loaded submodules whose original class is `torch.nn`'s class `name`."""
    bases = (LoadedSubmodule, *([Sliced] if name in ("Sequential", "ModuleList") else []), getattr(nn, name))
    return type(name, bases, {"__module__": LoadedSubmodule.__module__})


class Sliced:
    """Mixed into lists of modules: a slice is a plain list of the same modules."""

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)  # type: ignore[misc]
        modules = [*self._modules.values()][index]  # type: ignore[attr-defined]
        return nn.Sequential(*modules) if isinstance(self, nn.Sequential) else nn.ModuleList(modules)


def copied(
    module: Loaded,
    memo: dict[int, Any],
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    alone: type[nn.Module] | None = None,
) -> Any:
    """Return a copy of a loaded module, or of a submodule for a copied whole, which `memo` of `copy.deepcopy` holds.

    `given`: attributes of the copy that are no copies. `alone`: the class of a copy that is a plain module.
    """
    twin = memo[id(module)] = nn.Module.__new__(alone or type(module))
    twin.__dict__.update({name: {} for name in TABLES})
    left_out = (*TABLES, *given, "_own_attributes", *(("_origin",) if alone else ()))
    for name, value in module.__dict__.items():
        if name not in left_out:
            twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.__dict__.update(given)
    for name in TABLES:
        entries = {key: copy.deepcopy(entry, memo) for key, entry in module.__dict__[name].items()}
        twin.__dict__[name] = OrderedDict(entries) if name in HOOKS else entries
    if alone is None:
        watch_tables(twin)
    return twin


def build(
    whole: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor], constant: Callable[[Constant], Any]
) -> dict[str, torch.Tensor]:
    """Give a module the submodules and the state of a bundle; return tensors that are no parameter or buffer, by name.

    The module owns `tensors`, the state by name, from now on. `constant` returns the value of a constant leaf.
    """
    for record in manifest.modules:
        _place(whole, record, constant)
    constants: dict[str, torch.Tensor] = {}
    for entry in manifest.state:
        tensor = tensors[entry.name]
        if entry.role == "constant":
            constants[entry.name] = tensor.requires_grad_(entry.requires_grad)
        else:
            _register(whole, entry, tensor)
    return constants


def _place(whole: nn.Module, record: Record, constant: Callable[[Constant], Any]) -> None:
    """Put a submodule in the place of an original one."""
    path, _, name = record.name.rpartition(".")
    owner = whole
    if record.same_as is not None:
        at(whole, path)._modules[name] = at(whole, record.same_as)
        return
    if name:
        known = record.type if record.type in KNOWN else None
        origin = Origin(whole, record.name, known is not None)
        owner = (LoadedSubmodule if known is None else known_class(known))(origin)
        if record.attributes is not None and known is not None:
            origin.attributes = builder(record.attributes, constant)([])
            owner.__dict__.update(origin.attributes)
        at(whole, path)._modules[name] = owner
    for leaf in record.absent:
        owner._parameters[leaf] = None


def _register(whole: nn.Module, entry: StateTensor, tensor: torch.Tensor) -> None:
    value = nn.Parameter(tensor, requires_grad=entry.requires_grad) if entry.role == "parameter" else tensor
    if entry.role == "buffer" and entry.requires_grad:
        tensor.requires_grad_(True)
    for name in (entry.name, *entry.tied):
        path, _, leaf = name.rpartition(".")
        owner = at(whole, path)
        # Directly into the tables: a name of the user's may equal one of ours.
        if isinstance(value, nn.Parameter):
            owner._parameters[leaf] = value
        else:
            owner._buffers[leaf] = value
            if not entry.persistent:
                owner._non_persistent_buffers_set.add(leaf)


def at(whole: nn.Module, path: str) -> Any:
    """Return the submodule at `path`; make it if the bundle does not list submodules."""
    module, parts = whole, path.split(".") if path else []
    for position, part in enumerate(parts, 1):
        if part not in module._modules:
            module._modules[part] = LoadedSubmodule(Origin(whole, ".".join(parts[:position])))
        child = module._modules[part]
        assert isinstance(child, LoadedSubmodule)
        module = child
    return module
