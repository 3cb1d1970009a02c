"""Adapters: modules that change what the tensors of a loaded module compute, without a change of the module."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from aotexport_runtime.errors import ArgumentInvalid, NotSupported

_NONE: Mapping[int, tuple[str, ...]] = MappingProxyType({})
_OVERRIDES: ContextVar[Mapping[int, tuple[str, ...]]] = ContextVar("adapters of this thread's calls", default=_NONE)


@dataclass(eq=False)
class Adapters:
    """The named adapters of a loaded module.

    Calls apply the `active` ones; the module's own weights hold the `merged` ones. `bases` has digests of the weights
    that each was added beside, by their names.
    """

    configs: dict[str, Any] = field(default_factory=dict[str, Any])
    active: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    bases: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def applied(self) -> tuple[str, ...]:
        """Return the names of those that a call of this thread applies now."""
        overrides = _OVERRIDES.get()
        return overrides.get(id(self), self.active) if overrides else self.active

    @contextmanager
    def overridden(self, names: tuple[str, ...]) -> Generator[None, None, None]:
        """Let calls of this thread apply `names` in place of the active ones."""
        token = _OVERRIDES.set({**_OVERRIDES.get(), id(self): names})
        try:
            yield
        finally:
            _OVERRIDES.reset(token)

    def known(self, names: str | list[str]) -> tuple[str, ...]:
        """Return `names` as a tuple; refuse one that no adapter has (`ArgumentInvalid`)."""
        listed = (names,) if isinstance(names, str) else tuple(names)
        for name in listed:
            if name not in self.configs:
                there = ", ".join(f"`{other}`" for other in self.configs) or "none"
                raise ArgumentInvalid(f"there is no adapter `{name}`; the module has {there}")
        return listed

    def check_unmerged(self, what: str) -> None:
        """Refuse a module whose weights hold adapters (`NotSupported`)."""
        if self.merged:
            listed = ", ".join(f"`{name}`" for name in self.merged)
            raise NotSupported(f"{what}: the module's weights hold {listed}. Call `unmerge_adapter` first")


class Adapter(nn.ModuleDict):
    """The changes of one tensor of a loaded module, by the name of the adapter that each belongs to.

    A change has `forward(result, x, weight, bias)`, which adjusts the result of an operator, and `merged(weight)`, the
    changed tensor.

    Attributes:
        in_weight: whether changes take the place of the tensor (weight space), or adjust the results of nodes that read
            it (graph space).
        before: digest of the tensor before a merge, and its checksum after.
    """

    def __init__(self, adapters: Adapters, tensor: str, *, in_weight: bool) -> None:
        super().__init__()
        self.adapters = adapters
        self.tensor = tensor
        self.in_weight = in_weight
        self.before: tuple[str, int] = ("", 0)

    def is_needed(self) -> bool:
        """Return whether calls need it: not while weights hold adapters."""
        return len(self) > 0 and not self.adapters.merged

    def held(self, names: Sequence[str]) -> list[Any]:
        """Return its changes for adapters."""
        return [self[name] for name in names if name in self]

    def adapted(
        self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the adapted result of an operator on its input `x`, the tensor and a bias."""
        for change in self.held(self.adapters.applied()):
            result = change(result, x, weight, bias)
        return result

    def adapted_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that calls read in place of `tensor`."""
        for change in self.held(self.adapters.applied()):
            tensor = change.merged(tensor)
        return tensor


def adapters_below(whole: nn.Module) -> list[tuple[str, Adapter]]:
    """Return all adapters, each with the path of the module that holds it."""
    children = ((path, child) for path, module in whole.named_modules() for child in module.children())
    return [(path, child) for path, child in children if isinstance(child, Adapter)]


def adapted_call(module: nn.Module, result: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the adapted result of a call of a layer by the code of its class; refuse what that does not know."""
    for adapter in module.children():
        if not isinstance(adapter, Adapter) or not adapter.is_needed():
            continue
        if adapter.in_weight:
            raise NotSupported(
                f"a `{type(module).__name__}` computes with its own `{adapter.tensor}` here, and has an adapter that "
                "takes its place. Merge the adapter first (`aotexport_runtime.adapters.merge_adapter`)"
            )
        bias: Any = getattr(module, "bias", None)
        result = adapter.adapted(result, args[0], getattr(module, adapter.tensor), bias)
    return result
