"""`add_lora`: adapters beside weights of a loaded bundle."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from aotexport_runtime.adapters.base import weight_digests
from aotexport_runtime.adapters.config import Bias, LoraConfig
from aotexport_runtime.adapters.factors import FACTORS, Factors, Whole, groups_of
from aotexport_runtime.adapters.select import adapters_of, set_adapter
from aotexport_runtime.adapters.targets import Report, Target, Weights
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.submodules.adapter import Adapter, Adapters, adapters_below
from aotexport_runtime.submodules.places import named
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.values.parts import is_distributed


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
        targets: `"all-linear"` (every linear layer but output layers of the size of an embedding), or layers by path,
            by the end of a path, or by a pattern (`"*.query"`); a parameter that is no layer's `weight` by its name.
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
    config = LoraConfig(
        r=r,
        alpha=alpha,
        dropout=dropout,
        use_rslora=use_rslora,
        use_dora=use_dora,
        bias=bias,
        modules_to_save=tuple(modules_to_save) or None,
    )
    weights = Weights(module)
    chosen = weights.chosen(targets, exclude)
    saved = saved_paths(module, config)
    chosen = [t for t in chosen if not any(_is_in(t.path, path) for path in saved)]
    return attach(module, name, config, [(target, r) for target in chosen])


def attach(module: BundleModule, name: str, config: LoraConfig, ranks: Sequence[tuple[Target, int]]) -> Report:
    """Give targets a change each, of their rank, for the adapter `name`; see `add_lora`."""
    adapters = adapters_of(module)
    adapters.check_unmerged(f"adapter `{name}` cannot be added")
    _check_name(adapters, name)
    _check_differentiable(module)
    check_whole(module, name)
    _check_loaded(module, [target for target, _ in ranks])
    base = weight_digests(module, saved_paths(module, config))
    made = [(target, _factors(module, target, r, config)) for target, r in ranks]
    trained = _trained(module, config, [target for target, _ in ranks])
    for target, factors in made:
        beside = _beside(module, adapters, "lora", target.path, target.tensor, in_weight=target.form == "weight")
        beside[name] = factors.train(module.training)
    for path, tensor, parameter in trained:
        _beside(module, adapters, "trained", path, tensor, in_weight=True)[name] = Whole(parameter)
    adapters.configs[name], adapters.bases[name] = config, base
    _freeze(module, config)
    set_adapter(module, name)
    return report(module)


def report(module: BundleModule) -> Report:
    """Return the adapted weights of a loaded bundle, and the form that each adapter has.

    Raises:
        ArgumentInvalid: it is no loaded bundle.
    """
    adapters_of(module)
    weights = Weights(module)
    names = [(named(path, each.tensor), [*each.values()]) for path, each in adapters_below(module)]
    targets = [weights.target(name) for name, changes in names if isinstance(changes[0], Factors)]
    parameters = list(module.parameters())
    return Report(
        tuple(target for target in targets if target is not None),
        tuple(name for name, changes in names if isinstance(changes[0], Whole)),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() for p in parameters),
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


def _is_in(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.")


def _check_name(adapters: Adapters, name: str) -> None:
    if not name.isidentifier() or hasattr(Adapter(Adapters(), "", in_weight=False), name):
        raise ArgumentInvalid(f"`name`: {name!r} cannot be the name of an adapter; use letters, digits and `_`")
    if name in adapters.configs:
        raise ArgumentInvalid(f"`name`: the module has an adapter `{name}` already. Delete it first (`delete_adapter`)")


def _check_differentiable(module: BundleModule) -> None:
    for entry in module.bundle.manifest.programs:
        program = module.bundle.program(entry.name)
        if program.grad and not program.forward.differentiable:
            raise NotSupported(
                f"adapters need the forward graph under autograd, and the custom autograd functions of program "
                f"`{program.name}` are only in its joint graph"
            )


def _check_loaded(module: BundleModule, targets: Sequence[Target]) -> None:
    for change in module.changes():
        target = next((target for target in targets if _is_in(target.path, change.path)), None)
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
    weight: torch.Tensor = getattr(module.get_submodule(target.path), target.tensor)
    kind = FACTORS[target.kind]
    if target.form == "weight" and config.dropout:
        raise NotSupported(f"`{target.name}`: an adapter of the weight itself has no input to drop: {target.why}")
    if target.kind == "embedding" and config.use_dora:
        raise NotSupported(f"`{target.name}` is an embedding, which `use_dora` does not know. Leave it out (`exclude`)")
    groups = groups_of(target.options)
    if r % groups or (groups > 1 and config.use_dora):
        raise NotSupported(f"`{target.name}` is a convolution of {groups} groups: `r` must be a multiple, without DoRA")
    return kind(weight, r, config, config.scaling(target.path, r), target.options)


def _trained(
    module: BundleModule, config: LoraConfig, targets: Iterable[Target]
) -> list[tuple[str, str, torch.Tensor]]:
    """Return path, name and value of the parameters that an adapter trains whole."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    adapted, whole = {target.path for target in targets}, saved_paths(module, config)
    for path, owner in module.named_modules():
        if not (owner is module or isinstance(owner, LoadedSubmodule)):
            continue
        saved = any(_is_in(path, each) for each in whole)
        if saved and next(owner.buffers(recurse=False), None) is not None:
            raise NotSupported(f"`modules_to_save`: `{path}` has buffers, which an adapter cannot hold")
        biases = config.bias == "all" or (config.bias == "lora_only" and path in adapted)
        for tensor, parameter in owner.named_parameters(recurse=False):
            if saved or (biases and tensor.rpartition(".")[2] == "bias"):
                found[path, tensor] = parameter
    return [(path, tensor, parameter) for (path, tensor), parameter in found.items()]


def _beside(module: BundleModule, adapters: Adapters, kind: str, path: str, tensor: str, *, in_weight: bool) -> Adapter:
    """Return the adapter of a tensor, whose changes are of one kind; make it if there is none."""
    owner, key = module.get_submodule(path), kind if tensor == "weight" else f"{kind}_{tensor}"
    found = owner._modules.get(key)
    if not isinstance(found, Adapter):
        found = Adapter(adapters, tensor, in_weight=in_weight).train(module.training)
        owner.add_module(key, found)
    return found


def _freeze(module: BundleModule, config: LoraConfig) -> None:
    """Freeze all but modules of the user's that are saved with the adapter."""
    kept = saved_paths(module, config)
    for path, owner in module.named_modules():
        users = not (owner is module or isinstance(owner, LoadedSubmodule))
        for parameter in owner.parameters(recurse=False):
            parameter.requires_grad_(users and any(_is_in(path, each) for each in kept))
