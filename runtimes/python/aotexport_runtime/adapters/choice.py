"""Which of a module's adapters calls apply, and adapters that hold a change per name."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from aotexport_runtime.adapters.config import LoraConfig
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.submodules.adapter import Adapter, adapters_below

_NONE: Mapping[int, tuple[str, ...]] = MappingProxyType({})
_OVERRIDES: ContextVar[Mapping[int, tuple[str, ...]]] = ContextVar("adapters of this thread's calls", default=_NONE)


@dataclass(eq=False)
class Adapters:
    """The adapters of a loaded module.

    Attributes:
        configs: their settings, by name.
        active: names of those that calls apply.
        merged: names of those that the module's own weights hold.
        bases: digests of the weights that each was added beside, by their names.
    """

    configs: dict[str, LoraConfig] = field(default_factory=dict[str, LoraConfig])
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
        """Return `names` as a tuple.

        Raises:
            ArgumentInvalid: there is no adapter of such a name.
        """
        listed = (names,) if isinstance(names, str) else tuple(names)
        for name in listed:
            if name not in self.configs:
                there = ", ".join(f"`{other}`" for other in self.configs) or "none"
                raise ArgumentInvalid(f"there is no adapter `{name}`; the module has {there}")
        return listed

    def check_unmerged(self, what: str) -> None:
        """Refuse a module whose weights hold adapters.

        Raises:
            NotSupported: they do.
        """
        if self.merged:
            listed = ", ".join(f"`{name}`" for name in self.merged)
            raise NotSupported(f"{what}: the module's weights hold {listed}. Call `unmerge_adapter` first")


class NamedAdapter(Adapter):
    """An adapter that holds a change of its tensor per name."""

    def __init__(self, adapters: Adapters, tensor: str, *, in_weight: bool) -> None:
        """Begin without a change.

        Args:
            adapters: the adapters of the loaded module; shared.
            tensor: see `Adapter`.
            in_weight: see `Adapter`.
        """
        super().__init__(tensor, in_weight=in_weight)
        self.adapters = adapters

    def is_needed(self) -> bool:
        """Return whether calls need it: not while weights hold adapters."""
        return bool(self.names()) and not self.adapters.merged

    def names(self) -> list[str]:
        """Return the names that it holds a change for."""
        return [*self._modules, *self._parameters]

    def change(self, name: str) -> Any:
        """Return its change for an adapter; None: it has none."""
        return self._modules.get(name, self._parameters.get(name))

    def applied(self) -> list[Any]:
        """Return the changes that a call applies now."""
        names = self.adapters.applied()
        return [change for name in names if (change := self.change(name)) is not None]

    def forget(self, name: str) -> None:
        """Drop the change of an adapter."""
        self._modules.pop(name, None)
        self._parameters.pop(name, None)

    def merge(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Change the tensor of `module` by adapters, in place."""
        raise NotImplementedError

    def unmerge(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Take a change by `merge` back."""
        raise NotImplementedError


def named_adapters(module: BundleModule) -> list[tuple[str, NamedAdapter]]:
    """Return the adapters of a loaded module, each with the path of the module that holds it."""
    below = adapters_below(module).items()
    return [(path, adapter) for path, beside in below for adapter in beside if isinstance(adapter, NamedAdapter)]


def adapters_of(module: BundleModule) -> Adapters:
    """Return the adapters of a loaded module; fresh ones where it has none.

    Raises:
        ArgumentInvalid: it is no loaded bundle.
    """
    if not isinstance(module, BundleModule):  # type: ignore[unnecessary-isinstance] (callers may pass anything)
        raise ArgumentInvalid(f"`module`: expected a loaded bundle, got {type(module).__name__}")
    found = next((each.adapters for _, each in named_adapters(module)), None)
    return Adapters() if found is None else found
