"""Adapters in peft's files: written from a loaded bundle, and loaded onto one."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from aotexport_runtime.adapters.add import attach, check_whole, saved_paths
from aotexport_runtime.adapters.base import KEY, check_base, check_unchanged, weight_digests
from aotexport_runtime.adapters.choice import adapters_of, named_adapters
from aotexport_runtime.adapters.factors import EmbeddingFactors, Factors
from aotexport_runtime.adapters.forms import Report
from aotexport_runtime.adapters.lora import Lora
from aotexport_runtime.adapters.peft_config import CONFIG_FILE, config_record, read_config
from aotexport_runtime.adapters.select import delete_adapter
from aotexport_runtime.adapters.targets import Target, Weights
from aotexport_runtime.errors import ArgumentInvalid, NotSupported, NotWritten
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.submodules.places import module_at, named
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.values.arguments import path_of
from aotexport_runtime.values.parts import Gathering, is_distributed

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_adapter(
    module: BundleModule,
    path: str | os.PathLike[str],
    *,
    name: str = "default",
    force: bool = False,
    any_base: bool = False,
) -> Path:
    """Write an adapter to files that peft loads onto the original model, with the same results.

    Of a module that `fully_shard` has parted, every rank calls this; rank 0 writes.

    Args:
        module: a loaded bundle with adapters.
        path: directory to write; other files in it stay.
        name: name of the adapter.
        force: replace an adapter at `path`.
        any_base: write an adapter whose base has changed since it was added, as one of the weights as they are now.

    Returns:
        The directory.

    Raises:
        ArgumentInvalid: there is no such adapter, `path` is no path, or a weight that the adapter was added beside has
            changed since, which is not looked for in a module in parts.
        NotSupported: the adapter is merged, or there is an adapter at `path`.
        NotWritten: the file system is full, read-only, or otherwise refuses.
    """
    adapters = adapters_of(module)
    adapters.known(name)
    adapters.check_unmerged("an adapter cannot be written")
    config, weights = adapters.configs[name], Weights(module)
    tensors = {_PREFIX + key: value.detach() for key, value in _entries(module, name)}
    targets = [weights.target(each) for each in _adapted(module, name)]
    record = config_record(config, [each for each in targets if each is not None], module.bundle.manifest.name)
    output, base = path_of("path", path), adapters.bases[name]
    gathering = Gathering(tensors.values(), in_parts=any(map(is_distributed, tensors.values())))
    if not any(map(is_distributed, module.parameters())):
        now = weight_digests(module, saved_paths(module, config))
        base = now if any_base else check_unchanged(name, base, now)
    metadata = {"format": "pt", KEY: json.dumps(base)}

    def write() -> None:
        if (output / CONFIG_FILE).exists() and not force:
            raise NotSupported(f"{str(output)!r} holds an adapter; choose another place, or replace it (`force=True`)")
        stored = {key: gathering.whole(tensor).cpu().contiguous() for key, tensor in tensors.items()}
        _write(output, record, stored, metadata)

    if gathering.in_parts:
        gathering.written_by_first_rank(write)
    else:
        write()
    return output.absolute()


def _write(output: Path, record: dict[str, Any], tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the files of an adapter, the settings last: without them there is no adapter.

    Raises:
        NotWritten: the file system refuses.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / CONFIG_FILE).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=output) as beside:
            stage = Path(beside)
            (stage / WEIGHTS_FILE).write_bytes(_in_order(save(tensors, metadata=metadata)))
            (stage / CONFIG_FILE).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                (stage / name).replace(output / name)
    except OSError as error:
        raise NotWritten(f"an adapter cannot be written to {str(output)!r}: {error}", error.errno or 0) from error


def _in_order(file: bytes) -> bytes:
    """Return a file of safetensors with sorted metadata: the library's order differs between calls."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + file[end:]


def load_adapter(
    module: BundleModule,
    path: str | os.PathLike[str],
    *,
    name: str = "default",
    trainable: bool = False,
    any_base: bool = False,
) -> Report:
    """Add an adapter from files of `save_adapter` or of peft to a loaded bundle, and let calls apply it.

    Args:
        module: the loaded bundle; changed in place.
        path: directory of the files.
        name: name that the adapter gets.
        trainable: whether its parameters require gradients.
        any_base: take an adapter that was trained over other weights of the same shapes.

    Returns:
        The adapted weights, and the form that each adapter has.

    Raises:
        ArgumentInvalid: no adapter can be read from `path`, it is of another base or shape, or the name is taken.
        NotSupported: it is of a kind that this runtime does not compute.
    """
    directory, adapters = path_of("path", path), adapters_of(module)
    config = read_config(directory)
    tensors, metadata = _read(directory / WEIGHTS_FILE)
    check_whole(module, name)
    # With all biases trained, peft also writes what it keeps apart for modules that are trained whole.
    twice = (".modules_to_save.", ".original_module.")
    keys = {key.removeprefix(_PREFIX): t for key, t in tensors.items() if not any(part in key for part in twice)}
    # peft lists names that heads of classifiers often have, whether the model has them or not.
    saved = tuple(path for path in config.modules_to_save if any(f".{path}." in f".{key}" for key in keys))
    config = dataclasses.replace(config, modules_to_save=saved)
    if not any_base:
        check_base(module, metadata, saved_paths(module, config), directory)
    ranks = [*_ranks(module, keys, directory)]
    report = attach(module, adapters, name, config, ranks)
    _fill(module, name, keys, directory, any_base=any_base)
    if not trainable:
        for _, adapter in named_adapters(module):
            adapter.requires_grad_(False)
        for path in _users_modules(module, name):
            module.get_submodule(path).requires_grad_(False)
    return report


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ArgumentInvalid(f"`path`: no adapter can be read from {str(path)!r}: {error}") from error


def _entries(module: BundleModule, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an adapter, each with its key below the model."""
    adapted = {each.rpartition(".")[0] for each in _adapted(module, name)}
    for path, adapter in named_adapters(module):
        change = adapter.change(name)
        if isinstance(change, Factors):
            yield from _factor_entries(path, change)
        elif change is not None:
            inner = "base_layer." if path in adapted else ""
            yield named(path, f"{inner}{adapter.tensor}"), change
    for path in _users_modules(module, name):
        yield from ((f"{path}.{key}", value) for key, value in module.get_submodule(path).state_dict().items())


def _users_modules(module: BundleModule, name: str) -> list[str]:
    """Return the paths of the user's own modules that an adapter is saved with."""
    paths = saved_paths(module, adapters_of(module).configs[name])
    return [path for path in paths if not isinstance(module_at(module, path), LoadedSubmodule)]


def _factor_entries(path: str, factors: Factors) -> Iterator[tuple[str, torch.Tensor]]:
    embeds = isinstance(factors, EmbeddingFactors)
    yield named(path, "lora_embedding_A" if embeds else "lora_A.weight"), factors.A
    yield named(path, "lora_embedding_B" if embeds else "lora_B.weight"), factors.B
    if factors.magnitude is not None:
        # peft's has an axis for each of a convolution's weight.
        shape = (1, -1, *(1 for _ in factors.A.shape[2:])) if factors.A.dim() > 2 else factors.magnitude.shape
        yield named(path, "lora_magnitude_vector"), factors.magnitude.view(shape)


def _adapted(module: BundleModule, name: str) -> list[str]:
    """Return the names of the weights that an adapter changes."""
    return [
        named(path, adapter.tensor)
        for path, adapter in named_adapters(module)
        if isinstance(adapter, Lora) and adapter.change(name) is not None
    ]


def _ranks(module: BundleModule, keys: Mapping[str, torch.Tensor], directory: Path) -> Iterator[tuple[Target, int]]:
    """Yield the weights that an adapter's file changes, with the rank of each."""
    weights = Weights(module)
    for key, tensor in keys.items():
        for ending in ("lora_A.weight", "lora_embedding_A"):
            if key != ending and not key.endswith(f".{ending}"):
                continue
            name = f"{key.removesuffix(ending)}weight"
            target = weights.target(name) if name in weights.entries else None
            if target is None:
                raise ArgumentInvalid(
                    f"{directory}: the adapter changes `{name}`, and no program of {module.bundle.manifest.name!r} has "
                    "such a weight. Load the bundle of the model that it was trained on"
                )
            yield target, tensor.shape[0]


def _fill(
    module: BundleModule, name: str, tensors: Mapping[str, torch.Tensor], directory: Path, *, any_base: bool
) -> None:
    """Copy an adapter's tensors into the parameters that were made for them.

    Raises:
        ArgumentInvalid: one has another shape, is missing, or is there and has no place.
    """
    places, weights = dict(_entries(module, name)), dict(module.named_parameters(remove_duplicate=False))
    keys: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        weight = None if key in places else weights.get(f".{key}".replace(".base_layer.", ".")[1:])
        # With an adapted embedding, peft also writes the weight of the base.
        if weight is None or not (any_base or torch.equal(weight.detach().cpu(), tensor)):
            keys[key] = tensor
    problem = _problem(keys, places)
    if problem is not None:
        delete_adapter(module, name)
        raise ArgumentInvalid(f"{directory}: {problem}. Load the bundle of the model that it was trained on")
    with torch.no_grad():
        for key, place in places.items():
            place.copy_(keys[key])


def _problem(keys: Mapping[str, torch.Tensor], places: Mapping[str, Any]) -> str | None:
    for key in sorted(keys.keys() | places.keys()):
        if key not in places and "base_layer." in key:
            return f"the adapter has `{key}`, a weight of the model under it, and the module has another"
        if key not in places:
            return f"the adapter has `{key}`, which has no place in the module"
        if key not in keys:
            return f"the adapter has no `{key}`"
        if keys[key].shape != places[key].shape:
            return f"`{key}` is {list(keys[key].shape)}, and the module needs {list(places[key].shape)}"
    return None


__all__ = ["WEIGHTS_FILE", "load_adapter", "save_adapter"]
