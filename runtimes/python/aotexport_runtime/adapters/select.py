"""Which adapters calls apply: switched, left out, merged into the weights, deleted."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from aotexport_runtime.adapters.base import checksum, digest_of, remember
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.submodules.adapter import Adapters, adapters_below
from aotexport_runtime.submodules.places import named


def adapters_of(module: BundleModule) -> Adapters:
    """Return the adapters of a loaded module; fresh ones where it has none. No loaded bundle: `ArgumentInvalid`."""
    if not isinstance(module, BundleModule):  # type: ignore[unnecessary-isinstance] (callers may pass anything)
        raise ArgumentInvalid(f"`module`: expected a loaded bundle, got {type(module).__name__}")
    return next((each.adapters for _, each in adapters_below(module)), Adapters())


def set_adapter(module: BundleModule, names: str | list[str]) -> None:
    """Let calls apply one adapter, or several added up, and train these alone.

    Args:
        module: a loaded bundle with adapters.
        names: names of the adapters.

    Raises:
        ArgumentInvalid: there is no such adapter.
        NotSupported: the module's weights hold merged adapters.
    """
    adapters = adapters_of(module)
    chosen = adapters.known(names)
    adapters.check_unmerged("adapters cannot be switched")
    adapters.active = chosen
    for _, adapter in adapters_below(module):
        for name, change in adapter.items():
            change.requires_grad_(name in chosen)


def use_adapter(module: BundleModule, names: str | list[str]) -> AbstractContextManager[None]:
    """Return a context in which calls of this thread apply other adapters; calls of other threads go on as before.

    Args:
        module: a loaded bundle with adapters.
        names: names of the adapters; `[]`: none.

    Raises:
        ArgumentInvalid: there is no such adapter.
        NotSupported: the module's weights hold merged adapters.
    """
    adapters = adapters_of(module)
    chosen = adapters.known(names)
    adapters.check_unmerged("adapters cannot be switched")
    return adapters.overridden(chosen)


def disable_adapters(module: BundleModule) -> AbstractContextManager[None]:
    """Return a context in which calls of this thread apply no adapter: `use_adapter(module, [])`.

    Args:
        module: a loaded bundle with adapters.

    Raises:
        NotSupported: the module's weights hold merged adapters.
    """
    return use_adapter(module, [])


def merge_adapter(module: BundleModule, names: str | list[str] | None = None) -> None:
    """Write adapters into the weights, in place: calls run as without adapters, and `save` writes the changed weights.

    Args:
        module: a loaded bundle with adapters.
        names: names of the adapters; None: the active ones.

    Raises:
        ArgumentInvalid: there is no such adapter.
        NotSupported: weights hold merged adapters already, or an adapted weight is tied to another, or is that of a
            convolution in groups.
    """
    adapters = adapters_of(module)
    chosen = adapters.active if names is None else adapters.known(names)
    if not chosen:
        raise ArgumentInvalid("the module has no adapter to merge. Add one first (`add_lora`, `load_adapter`)")
    adapters.check_unmerged("adapters cannot be merged")
    _check_mergeable(module, chosen)
    with torch.no_grad():
        for path, adapter in adapters_below(module):
            if held := adapter.held(chosen):
                weight = getattr(module.get_submodule(path), adapter.tensor)
                digest = digest_of(weight)
                for change in held:
                    change.merge(weight)
                adapter.before = digest, checksum(weight)
    adapters.merged = chosen
    module.changed()


def unmerge_adapter(module: BundleModule) -> None:
    """Take merged adapters out of the weights again, to within rounding.

    Args:
        module: a loaded bundle with merged adapters.

    Raises:
        ArgumentInvalid: no adapter is merged.
    """
    adapters = adapters_of(module)
    if not adapters.merged:
        raise ArgumentInvalid("the module's weights hold no adapter. Merge one first (`merge_adapter`)")
    with torch.no_grad():
        for path, adapter in adapters_below(module):
            if held := adapter.held(adapters.merged):
                weight = getattr(module.get_submodule(path), adapter.tensor)
                unchanged = adapter.before[1] == checksum(weight)
                for change in reversed(held):
                    change.unmerge(weight)
                if unchanged:
                    remember(weight, adapter.before[0])
    adapters.merged = ()
    module.changed()


def delete_adapter(module: BundleModule, name: str) -> None:
    """Remove an adapter; the rest stays frozen, and calls apply the others that were active.

    Args:
        module: a loaded bundle with adapters.
        name: name of the adapter. One that is merged stays in the weights for good.

    Raises:
        ArgumentInvalid: there is no such adapter.
    """
    adapters = adapters_of(module)
    adapters.known(name)
    for path, adapter in adapters_below(module):
        adapter._modules.pop(name, None)
        if not len(adapter):
            owner = module.get_submodule(path)
            owner._modules.pop(next(key for key, value in owner._modules.items() if value is adapter))
    del adapters.configs[name], adapters.bases[name]
    adapters.active = tuple(each for each in adapters.active if each != name)
    adapters.merged = tuple(each for each in adapters.merged if each != name)
    module.changed()


def _check_mergeable(module: BundleModule, chosen: tuple[str, ...]) -> None:
    groups = [(entry.name, *entry.tied) for entry in module.bundle.manifest.state if entry.tied]
    for path, adapter in adapters_below(module):
        name, changes = named(path, adapter.tensor), adapter.held(chosen)
        if any(getattr(change, "groups", 1) > 1 for change in changes):
            raise NotSupported(
                f"`{name}` is that of a convolution in groups, and its adapter reads the channels of all groups, as "
                "peft's does. No weight of its shape holds that: leave the adapter apart"
            )
        other = next((each for group in groups if name in group for each in group if each != name), None)
        if other is not None and changes:
            raise NotSupported(
                f"`{name}` is one tensor with `{other}`, whose layer a merged weight would change too. Leave the "
                "adapter apart, or export a model whose weights are not tied"
            )
