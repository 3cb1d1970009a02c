"""Tensors that have several names: programs and bundles hold one for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.submodules.places import slot_of


def name_tied(entries: Sequence[StateTensor], state: dict[str, Any], prefix: str, find: Callable[[str], Any]) -> None:
    """Add the names that tied tensors lack in a state dict: files of safetensors have one of them.

    Args:
        entries: state tensors with several names.
        state: what is to be loaded.
        prefix: of its names.
        find: returns the module's current tensor of a name; None: there is none.
    """
    for entry in entries:
        first = find(entry.name)
        names = [prefix + name for name in (entry.name, *entry.tied) if find(name) is first]
        known = next((state[name] for name in names if name in state), None)
        for name in names if known is not None else ():
            state.setdefault(name, known)


def check_ties(module: nn.Module, entries: Sequence[StateTensor]) -> None:
    """Refuse a module whose tied tensors are tied no longer.

    Raises:
        NotSupported: names them.
    """
    for entry in (entry for entry in entries if entry.tied and entry.role != "constant"):
        names = (entry.name, *entry.tied)
        slots = [slot_of(module, name) for name in names]
        first, *others = [None if slot is None else slot[0].get(slot[1]) for slot in slots]
        if any(other is not first for other in others):
            listed = ", ".join(f"`{name}`" for name in names)
            raise NotSupported(f"{listed} are one tensor in the programs, and no longer are in the module")
