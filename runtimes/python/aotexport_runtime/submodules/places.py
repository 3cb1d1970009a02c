"""Current places of tensors and submodules of a loaded module."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

from torch import nn

StateSlot = tuple[dict[str, Any], str]
"""The table, and the key in it, that hold the current tensor of a name."""


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
