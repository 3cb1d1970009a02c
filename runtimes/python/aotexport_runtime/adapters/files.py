"""Adapters in peft's files: written from a loaded bundle, and loaded onto one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from aotexport_runtime.adapters.base import KEY, check_base, differences, weight_digests
from aotexport_runtime.adapters.config import CONFIG_FILE, LIMITS, config_record, read_config
from aotexport_runtime.adapters.factors import FACTORS, EmbeddingFactors, Factors
from aotexport_runtime.adapters.lora import adapters_of, attach, check_whole, delete_adapter, saved_paths
from aotexport_runtime.adapters.targets import Report, Target, Weights
from aotexport_runtime.bundle.directory import MAX_HOLE_NBYTES, BundleDirectory, hole_nbytes, open_regular, read_most
from aotexport_runtime.bundle.staging import staged
from aotexport_runtime.bundle.weights import read_tensors
from aotexport_runtime.commands.saving import link
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, NotSupported, NotWritten
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.codec import decode_plain
from aotexport_runtime.schema.limits import DEFAULT
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.submodules.tables import module_at, named
from aotexport_runtime.values.arguments import path_of
from aotexport_runtime.values.meshes import Gathering, is_distributed

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
    config, targets = adapters.configs[name], Weights(module).targets(_adapted(module, name))
    tensors = {_PREFIX + key: value.detach() for key, value in _entries(module, name)}
    record = config_record(config, targets, module.bundle.manifest.name)
    output, base = path_of("path", path), adapters.bases[name]
    gathering = Gathering(tensors.values(), in_parts=any(map(is_distributed, tensors.values())))
    if not any(map(is_distributed, module.parameters())):
        now = weight_digests(module, saved_paths(module, config))
        changed = None if any_base else next(differences(base, now), None)
        if changed is not None:
            raise ArgumentInvalid(
                f"adapter `{name}` cannot be written: `{changed}` has changed since it was added, and its file does "
                "not hold that. Train the layer with the adapter (`modules_to_save`), add the adapter after the "
                "change, or write it as one of the weights as they are now (`any_base=True`)"
            )
        base = now
    metadata = {"format": "pt", KEY: json.dumps(base)}

    def write() -> None:
        if not force and (output / CONFIG_FILE).exists():
            raise NotSupported(f"{str(output)!r} holds an adapter; choose another place, or replace it (`force=True`)")
        stored = {key: gathering.whole(tensor).cpu().contiguous() for key, tensor in tensors.items()}
        _write(output, record, stored, metadata)

    gathering.written_by_first_rank(write)
    return output.absolute()


def _write(output: Path, record: dict[str, Any], tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write an adapter, the settings last: without them there is none. One that is there is replaced in one step."""
    files = {
        WEIGHTS_FILE: _in_order(save(tensors, metadata=metadata)),
        CONFIG_FILE: f"{json.dumps(record, indent=2, sort_keys=True)}\n".encode(),
    }
    if (output / CONFIG_FILE).exists():
        with staged(output, force=True, marker=CONFIG_FILE) as stage:
            shutil.copytree(output, stage, symlinks=True, copy_function=link, dirs_exist_ok=True)
            for name, data in files.items():
                (stage / name).unlink(missing_ok=True)  # The file that it is linked to stays.
                (stage / name).write_bytes(data)
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output) as beside:
            for name, data in files.items():
                (Path(beside) / name).write_bytes(data)
            for name in files:
                (Path(beside) / name).replace(output / name)
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
    settings, tensors, metadata = _read(directory, module.bundle.limits.bundle_nbytes)
    config = read_config(settings, directory / CONFIG_FILE)
    check_whole(module, name)
    # With all biases trained, peft also writes what it keeps apart for modules that are trained whole.
    twice = (".modules_to_save.", ".original_module.")
    keys = {key.removeprefix(_PREFIX): t for key, t in tensors.items() if not any(part in key for part in twice)}
    # peft lists names that heads of classifiers often have, whether the model has them or not.
    saved = tuple(path for path in config.modules_to_save or () if any(f".{path}." in f".{key}" for key in keys))
    config = msgspec.structs.replace(config, modules_to_save=saved or None)
    if not any_base:
        check_base(module, metadata, saved_paths(module, config), directory)
    ranks = [*_ranks(module, keys, directory)]
    active, trained = adapters.active, {each: each.requires_grad for each in module.parameters()}
    report = attach(module, name, config, ranks)
    try:
        _fill(module, name, keys, directory, any_base=any_base)
    except ArgumentInvalid:
        delete_adapter(module, name)
        adapters.active = active
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
        raise
    if not trainable:
        for _, adapter in adapters_below(module):
            adapter.requires_grad_(False)
        for path in _users_modules(module, name):
            module.get_submodule(path).requires_grad_(False)
    return report


def _read(directory: Path, most: int) -> tuple[bytes, dict[str, torch.Tensor], dict[str, str]]:
    """Return settings, tensors and metadata of an adapter, from one directory, wherever its path leads meanwhile."""
    try:
        held = BundleDirectory(directory)
        with open_regular(held.files / CONFIG_FILE) as settings, open_regular(held.files / WEIGHTS_FILE) as weights:
            size = os.fstat(weights.fileno()).st_size
            if size > most or hole_nbytes(weights) > MAX_HOLE_NBYTES:
                raise OSError(errno.EFBIG, f"more than {most} bytes, or holes in the place of data")
            config, data = read_most(settings, LIMITS.json_nbytes), weights.read(size)
        tensors = read_tensors(data, where=WEIGHTS_FILE)
        header = decode_plain(data[8 : 8 + int.from_bytes(data[:8], "little")], where=WEIGHTS_FILE, limits=DEFAULT)
        return config, tensors, header.get("__metadata__") or {}
    except (OSError, ValueError, BundleInvalid, NotSupported) as error:
        reason = error
        if isinstance(error, OSError) and isinstance(error.filename, str):
            reason = f"{os.path.basename(error.filename)}: {error.strerror}"
        raise ArgumentInvalid(f"`path`: no adapter can be read from {str(directory)!r}: {reason}") from None


def _entries(module: BundleModule, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an adapter, each with its key below the model."""
    adapted = {each.rpartition(".")[0] for each in _adapted(module, name)}
    for path, adapter in adapters_below(module):
        for change in adapter.held([name]):
            if not isinstance(change, Factors):
                inner = "base_layer." if path in adapted else ""
                yield named(path, f"{inner}{adapter.tensor}"), change.value
                continue
            key = named(path, "lora_embedding_{}" if isinstance(change, EmbeddingFactors) else "lora_{}.weight")
            yield key.replace("{}", "A"), change.A
            yield key.replace("{}", "B"), change.B
            if change.magnitude is not None:
                # peft's has an axis for each of a convolution's weight.
                shape = (1, -1, *(1 for _ in change.A.shape[2:])) if change.A.dim() > 2 else change.magnitude.shape
                yield named(path, "lora_magnitude_vector"), change.magnitude.view(shape)
    for path in _users_modules(module, name):
        yield from ((f"{path}.{key}", value) for key, value in module.get_submodule(path).state_dict().items())


def _users_modules(module: BundleModule, name: str) -> list[str]:
    """Return the paths of the user's own modules that an adapter is saved with."""
    paths = saved_paths(module, adapters_of(module).configs[name])
    return [path for path in paths if not isinstance(module_at(module, path), LoadedSubmodule)]


def _adapted(module: BundleModule, name: str) -> list[str]:
    """Return the names of the weights that an adapter changes."""
    return [
        named(path, adapter.tensor)
        for path, adapter in adapters_below(module)
        if any(isinstance(change, Factors) for change in adapter.held([name]))
    ]


def _ranks(module: BundleModule, keys: Mapping[str, torch.Tensor], directory: Path) -> Iterator[tuple[Target, int]]:
    """Yield the weights that an adapter's file changes, with the rank of each; its factors have their shapes."""
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
                    f"such a weight{_OTHERS}"
                )
            r = tensor.shape[0] if tensor.dim() else 0
            a, b = FACTORS[target.kind].shapes(target.weight(module), max(r, 1), target.options)
            other = key.removesuffix(ending) + ending.replace("_A", "_B")
            # Before parameters of such shapes are made.
            problem = _misfit(key, tensor, a) or (_misfit(other, keys[other], b) if other in keys else None)
            if problem is not None:
                raise ArgumentInvalid(f"{directory}: {problem}{_OTHERS}")
            yield target, r


def _misfit(key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """Return why a tensor is none for a floating parameter of this shape."""
    if tensor.shape != shape:
        return f"`{key}` is {list(tensor.shape)}, and the module needs {list(shape)}"
    return None if tensor.is_floating_point() else f"`{key}` is {tensor.dtype}, and the module needs floats"


_OTHERS = ". Load the bundle of the model that it was trained on"


def _fill(
    module: BundleModule, name: str, tensors: Mapping[str, torch.Tensor], directory: Path, *, any_base: bool
) -> None:
    """Copy an adapter's tensors into the parameters that were made for them."""
    places, weights = dict(_entries(module, name)), dict(module.named_parameters(remove_duplicate=False))
    keys: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        weight = None if key in places else weights.get(f".{key}".replace(".base_layer.", ".")[1:])
        # With an adapted embedding, peft also writes the weight of the base.
        if weight is None or not (any_base or torch.equal(weight.detach().cpu(), tensor)):
            keys[key] = tensor
    for key in sorted(keys.keys() | places.keys()):
        if key not in places:
            problem = f"the adapter has `{key}`, which has no place in the module"
            if "base_layer." in key:
                problem = f"the adapter has `{key}`, a weight of the model under it, and the module has another"
        elif key not in keys:
            problem = f"the adapter has no `{key}`"
        else:
            problem = _misfit(key, keys[key], places[key].shape)
        if problem is not None:
            raise ArgumentInvalid(f"{directory}: {problem}{_OTHERS}")
    with torch.no_grad():
        for key, place in places.items():
            place.copy_(keys[key])
