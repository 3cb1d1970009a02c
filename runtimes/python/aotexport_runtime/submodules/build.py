"""The tree of submodules of a loaded module, with its state, from a manifest."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from aotexport_runtime.allowed.modules import KNOWN
from aotexport_runtime.schema.manifest import Manifest, StateTensor
from aotexport_runtime.schema.manifest import Submodule as Record
from aotexport_runtime.schema.trees import Constant
from aotexport_runtime.submodules.submodule import LoadedSubmodule, Origin, known_class, seal
from aotexport_runtime.values.trees import builder


def build(
    whole: nn.Module,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    changed: Callable[[], None],
    constant: Callable[[Constant], Any],
) -> dict[str, torch.Tensor]:
    """Give a module the submodules and the state of a bundle; return tensors that are no parameter or buffer, by name.

    Args:
        whole: a module without either.
        manifest: manifest of the bundle.
        tensors: its state, by name; owned by the module from now on.
        changed: a method of the module, to be called when a submodule changes.
        constant: value of a constant leaf.
    """
    for record in manifest.modules:
        _place(whole, record, changed, constant)
    constants: dict[str, torch.Tensor] = {}
    for entry in manifest.state:
        tensor = tensors[entry.name]
        if entry.role == "constant":
            constants[entry.name] = tensor.requires_grad_(entry.requires_grad)
        else:
            _register(whole, entry, tensor, changed)
    return constants


def _place(whole: nn.Module, record: Record, changed: Callable[[], None], constant: Callable[[Constant], Any]) -> None:
    """Put a submodule in the place of an original one."""
    *path, name = record.name.split(".")
    owner = whole
    if record.same_as is not None:
        at(whole, path, changed)._modules[name] = at(whole, record.same_as.split("."), changed)
        return
    if name:
        known = record.type if record.type in KNOWN else None
        origin = Origin(record.name, nn.Module, changed, known is not None)
        owner = (LoadedSubmodule if known is None else known_class(known))(origin)
        if record.attributes is not None and known is not None:
            origin.attributes = builder(record.attributes, constant)([])
            owner.__dict__.update(origin.attributes)
        at(whole, path, changed)._modules[name] = owner
    for leaf in record.absent:
        owner._parameters[leaf] = None


def _register(whole: nn.Module, entry: StateTensor, tensor: torch.Tensor, changed: Callable[[], None]) -> None:
    value = nn.Parameter(tensor, requires_grad=entry.requires_grad) if entry.role == "parameter" else tensor
    if entry.role == "buffer" and entry.requires_grad:
        tensor.requires_grad_(True)
    for name in (entry.name, *entry.tied):
        *path, leaf = name.split(".")
        owner = at(whole, path, changed)
        # Directly into the tables: a name of the user's may equal one of ours.
        if isinstance(value, nn.Parameter):
            owner._parameters[leaf] = value
        else:
            owner._buffers[leaf] = value
            if not entry.persistent:
                owner._non_persistent_buffers_set.add(leaf)


def at(whole: nn.Module, path: list[str], changed: Callable[[], None]) -> nn.Module:
    """Return the submodule at `path`; make it if the bundle does not list submodules."""
    module = whole
    for position, part in enumerate(path):
        if part not in module._modules:
            module._modules[part] = LoadedSubmodule(Origin(".".join(path[: position + 1]), nn.Module, changed))
        child = module._modules[part]
        assert isinstance(child, LoadedSubmodule)
        module = child
    return module


def sealed(whole: nn.Module, changed: Callable[[], None]) -> None:
    """Record the current state of a module and its submodules as the loaded one; report every change from now on."""
    whole.__dict__["_origin"] = Origin("", type(whole), changed)
    for module in whole.modules():
        if module is whole or isinstance(module, LoadedSubmodule):
            seal(module)
