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
from aotexport_runtime.submodules.submodule import LoadedSubmodule, known_class
from aotexport_runtime.submodules.tables import Origin
from aotexport_runtime.values.trees import builder


def build(
    whole: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor], constant: Callable[[Constant], Any]
) -> dict[str, torch.Tensor]:
    """Give a module the submodules and the state of a bundle; return tensors that are no parameter or buffer, by name.

    Args:
        whole: a module without either; its method `changed` hears of changes.
        manifest: manifest of the bundle.
        tensors: its state, by name; owned by the module from now on.
        constant: value of a constant leaf.
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
