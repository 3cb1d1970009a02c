"""LoRA adapters beside weights of a loaded bundle: added, switched, merged into the weights, deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from aotexport_runtime.adapters.base import checksum, digest_of, remember, weight_digests
from aotexport_runtime.adapters.config import Bias, LoraConfig
from aotexport_runtime.adapters.factors import FACTORS, Factors, Whole, groups_of
from aotexport_runtime.adapters.targets import Report, Target, Weights, is_loaded
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.submodules.adapter import Adapter, Adapters, adapters_below
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.submodules.tables import is_below, named
from aotexport_runtime.values.meshes import is_distributed


def add_lora(
    module: BundleModule,
    targets: str | Sequence[str] = "all-linear",
    *,
    r: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
    bias: Bias = "none",
    modules_to_save: Sequence[str] = (),
    exclude: Sequence[str] = (),
    name: str = "default",
) -> Report:
    """Add a LoRA adapter to a loaded bundle, freeze everything else, and let calls apply it.

    With the same seed before it, its first values are those of peft.

    Args:
        module: the loaded bundle; changed in place.
        targets: `"all-linear"` (every linear layer but output layers of the size of an embedding, no router), or layers
            by path, by the end of a path, or by a pattern (`"*.query"`); a parameter that is no layer's `weight` by
            its name.
        r: rank.
        alpha: numerator of the scaling; a change is scaled by `alpha / r`.
        dropout: probability of dropout of the adapters' inputs.
        use_rslora: scale by `alpha / sqrt(r)` instead.
        use_dora: learn the magnitude of a weight's rows apart from their direction.
        bias: which biases are trained: `"none"`, `"all"`, or those of adapted layers (`"lora_only"`).
        modules_to_save: layers that are trained whole and saved with the adapter (a new head).
        exclude: layers to leave out of `targets`.
        name: name of the adapter.

    Returns:
        The adapted weights, and the form that each adapter has.

    Raises:
        ArgumentInvalid: a value is out of its range, a target means no weight, or the name is taken.
        NotSupported: a weight cannot have such an adapter, or the module's weights hold merged adapters.
    """
    adapters_of(module)
    whole = tuple(modules_to_save) or None
    config = LoraConfig(
        r=r, alpha=alpha, dropout=dropout, use_rslora=use_rslora, use_dora=use_dora, bias=bias, modules_to_save=whole
    )
    chosen, saved = Weights(module).chosen(targets, exclude), saved_paths(module, config)
    ranks = [(target, r) for target in chosen if not any(is_below(target.name, path) for path in saved)]
    return attach(module, name, config, ranks)


def attach(module: BundleModule, name: str, config: LoraConfig, ranks: Sequence[tuple[Target, int]]) -> Report:
    """Give targets a change each, of their rank, for the adapter `name`; see `add_lora`."""
    adapters, saved, targets = adapters_of(module), saved_paths(module, config), [target for target, _ in ranks]
    adapters.check_unmerged(f"adapter `{name}` cannot be added")
    if not name.isidentifier() or hasattr(Adapter(adapters, "", in_weight=False), name):
        raise ArgumentInvalid(f"`name`: {name!r} cannot be the name of an adapter; use letters, digits and `_`")
    if name in adapters.configs:
        raise ArgumentInvalid(f"`name`: the module has an adapter `{name}` already. Delete it first (`delete_adapter`)")
    for program in map(module.bundle.program, module.bundle.program_names):
        if program.grad and not program.forward.differentiable:
            raise NotSupported(
                f"adapters need the forward graph under autograd, and the custom autograd functions of program "
                f"`{program.name}` are only in its joint graph"
            )
    check_whole(module, name)
    _check_loaded(module, targets)
    base = weight_digests(module, saved)
    made = [(target, _factors(module, target, r, config)) for target, r in ranks]
    trained = _trained(module, config.bias, saved, {target.path for target in targets})
    for target, factors in made:
        beside = _beside(module, adapters, "lora", target.path, target.tensor, in_weight=target.form == "weight")
        beside[name] = factors.train(module.training)
    for path, tensor, parameter in trained:
        _beside(module, adapters, "trained", path, tensor, in_weight=True)[name] = Whole(parameter)
    adapters.configs[name], adapters.bases[name] = config, base
    for path, owner in module.named_modules():
        # Modules of the user's that are saved with the adapter are trained themselves.
        users = not is_loaded(owner, module) and any(is_below(f"{path}.", each) for each in saved)
        for parameter in owner.parameters(recurse=False):
            parameter.requires_grad_(users)
    set_adapter(module, name)
    return report(module)


def report(module: BundleModule) -> Report:
    """Return the adapted weights of a loaded bundle, and the form that each adapter has.

    Raises:
        ArgumentInvalid: it is no loaded bundle.
    """
    adapters_of(module)
    names = [(named(path, each.tensor), next(iter(each.values()))) for path, each in adapters_below(module)]
    return Report(
        tuple(Weights(module).targets(name for name, change in names if isinstance(change, Factors))),
        tuple(name for name, change in names if isinstance(change, Whole)),
        sum(p.numel() for p in module.parameters() if p.requires_grad),
        sum(p.numel() for p in module.parameters()),
    )


def saved_paths(module: BundleModule, config: LoraConfig) -> list[str]:
    """Return the paths of modules that an adapter trains whole: with such a path or end; none: `ArgumentInvalid`."""
    found: list[str] = []
    for wanted in config.modules_to_save or ():
        paths = [path for path, _ in module.named_modules() if path == wanted or path.endswith(f".{wanted}")]
        if not paths:
            children = ", ".join(f"`{name}`" for name, _ in module.named_children())
            raise ArgumentInvalid(f"`modules_to_save`: the module has no `{wanted}`; at its top are {children}")
        found += paths
    return found


def _check_loaded(module: BundleModule, targets: Sequence[Target]) -> None:
    for change in module.changes():
        target = next((target for target in targets if is_below(target.name, change.path)), None)
        if target is not None and not isinstance(change.module, LoadedSubmodule):
            raise NotSupported(
                f"`{change.path}` {change.how}, and adapters are put beside layers of the bundle alone. Leave it out "
                f"(`exclude=[{change.path!r}]`), train it whole (`modules_to_save=[{change.path!r}]`), or export the "
                "module with it (`aotexport.export(module, ...)`) and adapt that bundle"
            )


def check_whole(module: BundleModule, name: str) -> None:
    """Refuse a module in parts (`NotSupported`): gradients of parameters that come later would stay on their ranks."""
    parted = next((each for each, parameter in module.named_parameters() if is_distributed(parameter)), None)
    if parted is not None:
        raise NotSupported(
            f"adapter `{name}` cannot be added: `{parted}` is in parts over processes, and new parameters would have a "
            "gradient of their own on each. Add adapters first, then give the module to `fully_shard`"
        )


def _factors(module: BundleModule, target: Target, r: int, config: LoraConfig) -> Factors:
    """Return the first factors of a target."""
    if target.form == "weight" and config.dropout:
        raise NotSupported(f"`{target.name}`: an adapter of the weight itself has no input to drop: {target.why}")
    if target.computed is not None and config.use_dora:
        raise NotSupported(f"`{target.name}` is quantised, which `use_dora` does not know. Leave it out (`exclude`)")
    groups = groups_of(target.options)
    if r % groups or (groups > 1 and config.use_dora):
        raise NotSupported(f"`{target.name}` is a convolution of {groups} groups: `r` must be a multiple, without DoRA")
    return FACTORS[target.kind](target.weight(module), r, config, config.scaling(target.path, r), target.options)


def _trained(
    module: BundleModule, bias: Bias, saved: Sequence[str], adapted: set[str]
) -> list[tuple[str, str, torch.Tensor]]:
    """Return path, name and value of the parameters that an adapter of layers at paths `adapted` trains whole."""
    found: list[tuple[str, str, torch.Tensor]] = []
    for path, owner in module.named_modules():
        if not is_loaded(owner, module):
            continue
        whole = any(is_below(f"{path}.", each) for each in saved)
        if whole and next(owner.buffers(recurse=False), None) is not None:
            raise NotSupported(f"`modules_to_save`: `{path}` has buffers, which an adapter cannot hold")
        biases = bias == "all" or (bias == "lora_only" and path in adapted)
        for tensor, parameter in owner.named_parameters(recurse=False):
            if whole or (biases and tensor.rpartition(".")[2] == "bias"):
                found.append((path, tensor, parameter))
    return found


def _beside(module: BundleModule, adapters: Adapters, kind: str, path: str, tensor: str, *, in_weight: bool) -> Adapter:
    """Return the adapter of a tensor, whose changes are of one kind; make it if there is none."""
    owner, key = module.get_submodule(path), kind if tensor == "weight" else f"{kind}_{tensor}"
    found = owner._modules.get(key)
    if not isinstance(found, Adapter):
        found = Adapter(adapters, tensor, in_weight=in_weight).train(module.training)
        owner.add_module(key, found)
    return found


def adapters_of(module: BundleModule) -> Adapters:
    """Return the adapters of a loaded module; fresh ones where it has none. No loaded bundle: `ArgumentInvalid`."""
    if not isinstance(module, BundleModule):  # type: ignore[unnecessary-isinstance] (callers may pass anything)
        raise ArgumentInvalid(f"`module`: expected a loaded bundle, got {type(module).__name__}")
    return next((each.adapters for _, each in adapters_below(module)), Adapters())


def set_adapter(module: BundleModule, names: str | list[str]) -> None:
    """Let calls of a loaded bundle apply the adapter of this name, or several added up, and train these alone.

    Raises:
        ArgumentInvalid: there is no such adapter.
        NotSupported: the module's weights hold merged adapters.
    """
    adapters, chosen = _switched(module, names)
    adapters.active = chosen
    for _, adapter in adapters_below(module):
        for name, change in adapter.items():
            change.requires_grad_(name in chosen)


def _switched(module: BundleModule, names: str | list[str]) -> tuple[Adapters, tuple[str, ...]]:
    adapters = adapters_of(module)
    chosen = adapters.known(names)
    adapters.check_unmerged("adapters cannot be switched")
    return adapters, chosen


def use_adapter(module: BundleModule, names: str | list[str]) -> AbstractContextManager[None]:
    """Return a context in which calls of this thread apply other adapters; calls of other threads go on as before.

    `[]`: none. Errors: see `set_adapter`.
    """
    adapters, chosen = _switched(module, names)
    return adapters.overridden(chosen)


def disable_adapters(module: BundleModule) -> AbstractContextManager[None]:
    """Return a context in which calls of this thread apply no adapter: `use_adapter(module, [])`, see there."""
    return use_adapter(module, [])


def merge_adapter(module: BundleModule, names: str | list[str] | None = None) -> None:
    """Write adapters of a loaded bundle (None: the active ones) into its weights, in place.

    Calls then run as without adapters, and `save` writes the changed weights.

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
        for adapter, held, weight in _held(module, chosen):
            digest = digest_of(weight)
            for change in held:
                change.merge(weight)
            adapter.before = digest, checksum(weight)
    adapters.merged = chosen
    module.changed()


def _held(module: BundleModule, names: Sequence[str]) -> Iterator[tuple[Adapter, list[Any], torch.Tensor]]:
    """Yield the adapters that hold changes of these names, with the changes and the tensor that they change."""
    for path, adapter in adapters_below(module):
        if held := adapter.held(names):
            yield adapter, held, getattr(module.get_submodule(path), adapter.tensor)


def unmerge_adapter(module: BundleModule) -> None:
    """Take merged adapters out of the weights of a loaded bundle again, to within rounding.

    Raises:
        ArgumentInvalid: no adapter is merged.
    """
    adapters = adapters_of(module)
    if not adapters.merged:
        raise ArgumentInvalid("the module's weights hold no adapter. Merge one first (`merge_adapter`)")
    with torch.no_grad():
        for adapter, held, weight in _held(module, adapters.merged):
            unchanged = adapter.before[1] == checksum(weight)
            for change in reversed(held):
                change.unmerge(weight)
            if unchanged:
                remember(weight, adapter.before[0])
    adapters.merged = ()
    module.changed()


def delete_adapter(module: BundleModule, name: str) -> None:
    """Remove an adapter of a loaded bundle; the rest stays frozen, and calls apply the others that were active.

    One that is merged stays in the weights for good.

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
        if changes and not hasattr(module.get_submodule(path), adapter.tensor):
            raise NotSupported(
                f"`{name}` is quantised, and no integers hold a merged weight. Leave the adapter apart, or merge it "
                "into the bundle that this one was derived from (`load_adapter(..., any_base=True)`)"
            )
        if any(isinstance(change, Factors) and change.groups > 1 for change in changes):
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
