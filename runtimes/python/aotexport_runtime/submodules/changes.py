"""Submodules of a loaded module that differ from those that were loaded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.submodules.submodule import LoadedSubmodule, unread
from aotexport_runtime.submodules.tables import HOOKS, WRAP, Origin, is_below, is_sharded, module_at, named

_MISSING = object()


@dataclass(frozen=True)
class SubmoduleChange:
    """A change of a submodule since it was loaded.

    Attributes:
        module: the current module there; None: there is none.
        how: the change, as the rest of a sentence that begins with the path.
        keeps_state: whether its parameters, buffers and submodules are those that were loaded.
        runs_part: whether it still computes as the original, on its current arguments and state.
        wrapped: the original, a layer of the model's own class, if the current module holds it and may call it.
        needs_call: whether only a call of the submodule can follow the change.
        computes_state: whether it now computes its tensors, and nothing else changed.
    """

    path: str
    module: nn.Module | None
    how: str
    keeps_state: bool = False
    runs_part: bool = False
    needs_call: bool = False
    computes_state: bool = False
    wrapped: LoadedSubmodule | None = None


def _changes_below(module: nn.Module, mode: bool) -> Iterator[SubmoduleChange]:
    """Yield the changes below a loaded module, but not those below replaced ones; `mode` is the whole's."""
    origin: Origin = module.__dict__["_origin"]
    for name, child in origin.submodules.items():
        now, path = module._modules.get(name), named(origin.path, name)
        if now is None:
            yield SubmoduleChange(path, None, "was removed")
        elif now is not child:
            wrapped = _wrapped(child, now)
            how = f"was replaced by a `{type(now).__name__}`"
            yield SubmoduleChange(path, now, how, runs_part=wrapped is not None, wrapped=wrapped)
        elif isinstance(now, LoadedSubmodule):
            change = _change(now, now.__dict__["_origin"], mode)
            if change is not None:
                yield change
            yield from _changes_below(now, mode)


def _wrapped(child: Any, now: nn.Module) -> LoadedSubmodule | None:
    """Return the original below the module that replaced it, where only its part of a program can compute it."""
    origin: Origin = child.__dict__["_origin"]
    return child if not (origin.known or origin.submodules) and child in now.modules() else None


def _change(module: LoadedSubmodule, origin: Origin, mode: bool) -> SubmoduleChange | None:
    """Return the change of a submodule itself; None: it did not change."""
    change, runs_part = functools.partial(SubmoduleChange, origin.path, module), not origin.known
    has_hooks, own = any(module.__dict__[table] for table in HOOKS), ("training", "forward", "extra_repr")
    new = (name for name in module.__dict__ if not name.startswith("_") and name not in (*own, *origin.attributes))
    if not has_hooks and (name := next(new, None)) is not None:
        raise NotSupported(unread(name, origin.path))
    # `fully_shard` makes a class of its own, and gathers parameters by hooks.
    is_unit = is_sharded(module._parameters) and type(module).__bases__[1:] == (origin.type,)
    if type(module) is not origin.type and not is_unit:
        computed = "parametrizations" in module._modules
        how = "is parametrized" if computed else "has another class"
        return change(how, runs_part=runs_part, computes_state=computed)
    tensors = {**module._parameters, **module._buffers}
    gone = next((name for name in origin.tensors if tensors.get(name) is None), None)
    if gone is not None:
        computed = getattr(module, gone, None) is not None
        how = f"has a `{gone}` that is computed" if computed else f"has no `{gone}` anymore"
        return change(how, runs_part=runs_part, computes_state=computed)
    if isinstance(module, nn.Sequential) and module._modules.keys() != origin.submodules.keys():
        return change("has other submodules", needs_call=True)
    if isinstance(module, nn.Sequential | nn.ModuleDict) and [*module._modules] != [*origin.submodules]:
        return change("has its submodules in another order", needs_call=True)
    if (reshaped := module.reshaped()) is not None:
        return change(f"has a `{reshaped}` of another dtype, shape or class", runs_part=runs_part)
    for name, value in origin.attributes.items():
        now = module.__dict__.get(name, _MISSING)
        if type(now) is not type(value) or now != value:
            return change(f"has another `{name}`", needs_call=True)
    if "forward" in module.__dict__:
        return change("has another `forward`", keeps_state=True, runs_part=True)
    if module.training != mode and origin.known and not module._modules:
        return change(f"is in {'train' if module.training else 'eval'} mode", keeps_state=True)
    if has_hooks:
        return change("has hooks", keeps_state=True, runs_part=True)
    _check_nothing_added(module, origin)
    return None


def _check_nothing_added(module: nn.Module, origin: Origin) -> None:
    """Refuse a parameter or buffer that is new since the export, in a module without other changes (`NotSupported`)."""
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and name not in origin.tensors:
            path = named(origin.path, name)
            raise NotSupported(f"`{path}` was not there at export, so no call would use it. {WRAP}")


def changes_of(whole: nn.Module, manifest: Manifest) -> list[SubmoduleChange]:
    """Return the changes of submodules since the load, each by its first name; refuse others (`NotSupported`)."""
    origin: Origin = whole.__dict__["_origin"]
    _check_nothing_added(whole, origin)
    there = [name for name in origin.submodules if name in whole._modules]
    if isinstance(whole, nn.Sequential) and [name for name in whole._modules if name in origin.submodules] != there:
        raise NotSupported(f"the module has its submodules in another order, in which no call would run them. {WRAP}")
    found = _without_twins(whole, manifest, _changes_below(whole, whole.training))
    return [*found, *_with_ties(whole, manifest, found)]


def _without_twins(whole: nn.Module, manifest: Manifest, found: Iterable[SubmoduleChange]) -> list[SubmoduleChange]:
    """Return `found` with modules of several names, all of them changed alike, under the first name alone."""
    by_path = {change.path: change for change in found}
    for record in manifest.modules:
        if record.same_as is None:
            continue
        by_path.pop(record.name, None)
        if module_at(whole, record.name) is not module_at(whole, record.same_as):
            raise NotSupported(
                f"`{record.name}` and `{record.same_as}` are one module in the programs, and no longer are. "
                "Replace it by both names"
            )
    return list(by_path.values())


def _with_ties(whole: nn.Module, manifest: Manifest, found: list[SubmoduleChange]) -> list[SubmoduleChange]:
    """Return changes for submodules that shared a weight with a changed one, and so must be called too."""
    paths = [change.path for change in found if not change.keeps_state]
    known = {change.path for change in found}
    more: dict[str, SubmoduleChange] = {}
    for entry in manifest.state:
        names = (entry.name, *entry.tied) if entry.tied else ()
        if not any(is_below(name, path) for name in names for path in paths):
            continue
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = module_at(whole, path)
            if isinstance(module, LoadedSubmodule) and not any(is_below(name, other) for other in known):
                how = f"shared `{leaf}` with a submodule that changed"
                more[path] = SubmoduleChange(path, module, how, runs_part=True)
    return list(more.values())


def check_peft_targets(configs: Mapping[str, Any], changes: Sequence[SubmoduleChange], manifest: Manifest) -> None:
    """Refuse adapters of peft (`NotSupported`) on layers that it would not adapt, or would tie, on the original model.

    Source: peft 0.21, `tuners_utils._maybe_include_all_linear_layers`, `trainable_tokens.model`: the output layer and
    ties are those of a `PreTrainedModel` alone.
    """
    replaced = {change.path for change in changes if not isinstance(change.module, LoadedSubmodule)}
    entries = {name: entry for entry in manifest.state for name in (entry.name, *entry.tied)}
    shapes = {name: entry.shape for name, entry in entries.items()}
    words = {shapes.get(f"{record.name}.weight") for record in manifest.modules if record.type == "Embedding"}
    linear = [record.name for record in manifest.modules if record.type == "Linear"]
    head = linear[-1] if linear and shapes.get(f"{linear[-1]}.weight") in words else None
    for config in configs.values():
        targets = getattr(config, "target_modules", None) or ()
        if head in replaced and not isinstance(targets, str) and set(linear) <= set(targets):
            raise NotSupported(
                f"`all-linear` of peft leaves an output layer out on a model of transformers, and adapts `{head}` of a "
                f"loaded bundle. Load the bundle again, and pass `exclude_modules=[{head!r}]` too, or names of layers"
            )
        tokens = getattr(config, "trainable_token_indices", None) or config.peft_type == "TRAINABLE_TOKENS"
        for path in replaced if tokens else ():
            own = f"{path}.weight"
            entry = entries.get(own)
            ties = [name for name in (entry.name, *entry.tied) if name != own] if entry is not None else []
            if other := next((name for name in ties if not any(is_below(name, each) for each in replaced)), None):
                raise NotSupported(
                    f"peft trains tokens of `{own}` and `{other}` as one on a model of transformers, and "
                    "knows ties of bundles by a recipe alone. Load the bundle again, and train whole weights, or "
                    "export the model by `--recipe`"
                )
