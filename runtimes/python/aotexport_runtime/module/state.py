"""What a loaded bundle holds as an `nn.Module`: tensors and submodules by their original names, and what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import Request
from aotexport_runtime.engines.select import Choice
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.schema.graph import Subclass
from aotexport_runtime.submodules.changes import SubmoduleChange, changes_of
from aotexport_runtime.submodules.python_state import PythonState
from aotexport_runtime.submodules.submodule import Loaded, at
from aotexport_runtime.submodules.tables import LoadedState, StateSlot, slot_of
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import Form


class BundleState(Loaded):
    """State of a bundle by name, with what its programs are composed of; `BundleModule` adds the calls.

    Attributes:
        bundle: the open bundle.
    """

    def __init__(self, bundle: Bundle, environment: Environment, request: Request, targets: Choice) -> None:
        """Begin without tensors and submodules."""
        super().__init__()
        self.bundle = bundle
        self._environment = environment
        self._request = request
        self._targets = targets
        self._constants: dict[str, torch.Tensor] = {}
        self._changes: list[SubmoduleChange] | None = None
        self._untold: set[str] | None = None
        self._hooked = False
        self._loaded = LoadedState({})

    def _keep_attributes(self) -> None:
        """Let the module and its submodules read attributes that calls change from the Python state."""
        for attribute in self.bundle.manifest.attributes:
            path = attribute.name.rpartition(".")[0]
            at(self, path).keep(self.python_state, path)

    @property
    def device(self) -> torch.device | None:
        """Where the bundle was loaded to; None: where it was captured."""
        return self._environment.device

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The current tensors that calls use and that are no parameters or buffers, by name; not copied."""
        return self.__dict__["_constants"]

    @property
    def python_state(self) -> PythonState:
        """Attributes of the module that calls change."""
        return self.__dict__["_python_state"]

    def form(self, record: Subclass) -> Form:
        """Return the structure of a tensor subclass with its class, which the caller of `load` gave."""
        return self._environment.form(record)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load state in which tied tensors may have only one of their names, as in safetensors files."""
        for entry in (entry for entry in self.bundle.manifest.state if entry.tied):
            slots = {name: slot for name in (entry.name, *entry.tied) if (slot := self._find(name)) is not None}
            current = {name: table.get(key) for name, (table, key) in slots.items()}
            names = [prefix + name for name, tensor in current.items() if tensor is current.get(entry.name)]
            known = next((state_dict[name] for name in names if name in state_dict), None)
            for name in names if known is not None else ():
                state_dict.setdefault(name, known)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def changed(self) -> None:
        """Look for changes of submodules anew."""
        # Bypasses `__setattr__`, which handles the user's names.
        self.__dict__["_changes"] = None

    def changes(self) -> list[SubmoduleChange]:
        """Return the changes of submodules since the load.

        Raises:
            NotSupported: one was changed in a way that no call can follow.
        """
        found: list[SubmoduleChange] | None = self.__dict__["_changes"]
        if found is None:
            found = self.__dict__["_changes"] = changes_of(self, self.bundle.manifest)
        return found

    def _find(self, name: str) -> StateSlot | None:
        """Return the slot of a state tensor's current value, which may be replaced between calls; None: it is gone."""
        return (self._constants, name) if name in self._constants else slot_of(self, name)

    def _slot(self, name: str) -> StateSlot:
        slot = self._find(name)
        if slot is None:
            raise NotSupported(
                f"the module's `{name}` is gone, and the programs read it. Put a tensor of its dtype and shape in its "
                "place, or change the model and export it again"
            )
        return slot

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        for dtype in {tensor.dtype for tensor in self.present_tensors().values()}:
            converted = fn(torch.empty(0, dtype=dtype)).dtype
            if converted != dtype:
                raise NotSupported(
                    f"the programs were captured with weights of {dtypes.name_of(dtype)}, and do not hold for "
                    f"{dtypes.name_of(converted)}. Load the bundle in that dtype (`load(..., dtype=)`), or export again"
                )
        before = self.present_tensors()
        super()._apply(fn, recurse)
        for name, tensor in self._constants.items():
            self._constants[name] = fn(tensor)
        moved = {id(before[name]): tensor for name, tensor in self.present_tensors().items()}
        self.python_state.values = self.python_state.replaced(lambda tensor: moved.get(id(tensor), fn(tensor)))
        tensors = (*self.parameters(), *self.buffers(), *self._constants.values())
        devices = {tensor.device for tensor in tensors}
        if len(devices) == 1:
            self.__dict__["_environment"] = dataclasses.replace(self._environment, device=devices.pop())
            self.changed()
        return self

    def present_tensors(self) -> dict[str, torch.Tensor]:
        """Return the state tensors that the module has now, by name; not copied."""
        slots = {entry.name: self._find(entry.name) for entry in self.bundle.manifest.state}
        found = {name: slot[0].get(slot[1]) for name, slot in slots.items() if slot is not None}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensor of every entry of the manifest's state, by its first name; not copied."""
        slots = {entry.name: self._slot(entry.name) for entry in self.bundle.manifest.state}
        return {name: table[key] for name, (table, key) in slots.items()}
