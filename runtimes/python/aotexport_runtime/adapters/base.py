"""The base of an adapter: the weights that it is trained over, known by digests of their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from aotexport_runtime.bundle.weights import load_tensors
from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import FLOATS, CastBundle
from aotexport_runtime.submodules.adapter import Adapter
from aotexport_runtime.submodules.tables import is_below
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import is_wrapper, parts

KEY = "aotexport_weights"
"""Key of the digests in the metadata of an adapter's file."""
_KNOWN: Any = WeakTensorKeyDictionary()
"""Version, checksum and digest of tensors that were looked at."""


def weight_digests(module: BundleModule, without: Iterable[str] = ()) -> dict[str, str]:
    """Return a digest of each parameter's values now, by name, without adapters and modules at the paths `without`."""
    skipped = [*without, *(path for path, each in module.named_modules() if isinstance(each, Adapter))]
    found = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not any(is_below(name, path) for path in skipped)
    }
    different = {id(parameter): parameter for parameter in found.values()}
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter
        digests = dict(zip(different, threads.map(digest_of, different.values()), strict=True))
    return {name: digests[id(parameter)] for name, parameter in found.items()}


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's values."""
    if tensor.is_inference():  # it has no version
        return _digest(tensor)
    state, known = (tensor._version, checksum(tensor)), _KNOWN.get(tensor)
    if known is None or known[0] != state:
        known = _KNOWN[tensor] = state, _digest(tensor)
    return known[1]


def remember(tensor: torch.Tensor, digest: str) -> None:
    """Let a tensor that is back at former values, but for rounding, have their digest."""
    _KNOWN[tensor] = (tensor._version, checksum(tensor)), digest


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum over a tensor's bytes: writes through `tensor.data` raise no version."""
    parts_of = ((data, len(data) // 8 * 8) for data in _bytes(tensor))
    return sum(int(data[:whole].view(np.int64).sum()) + int(data[whole:].sum()) for data, whole in parts_of)


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for data in _bytes(tensor):
        digest.update(data)
    return digest.hexdigest()[:32]


def _bytes(tensor: torch.Tensor) -> Iterator[Any]:
    for part in parts(tensor):
        yield part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def check_base(module: BundleModule, metadata: Mapping[str, str], without: Iterable[str], directory: Path) -> None:
    """Refuse an adapter of a `directory` that was trained over other weights than a module has now (`ArgumentInvalid`).

    Modules at the paths `without`, which it replaces, do not count. A file of peft names no base, and is taken.
    """
    if KEY not in metadata:
        return
    try:
        then = msgspec.json.decode(metadata[KEY], type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ArgumentInvalid(f"{directory}: the digests of the adapter's base cannot be read: {error}") from None
    now = weight_digests(module, without)
    differs = next((name for name in differences(then, now) if not _is_rounded(module, name, then, now)), None)
    if differs is not None:
        raise ArgumentInvalid(
            f"{directory}: the adapter was trained over other weights than {module.bundle.manifest.name!r} has now: "
            f"`{differs}` differs. Load the bundle that it was trained over, or take it all the same (`any_base=True`)"
        )


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of weights whose digests differ."""
    return (name for name in {**then, **now} if then.get(name) != now.get(name))


def _is_rounded(module: BundleModule, name: str, then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether a weight is the former one but for its floating dtype."""
    bundle = module.bundle
    if name not in then or name not in now or is_wrapper(weight := module.get_parameter(name).detach()):
        return False
    if isinstance(bundle, CastBundle):
        state = bundle.original.manifest.state
        for entry in (entry for entry in state if name in (entry.name, *entry.tied)):
            stored = load_tensors(bundle.original, [entry], module.form)[entry.name]
            weight = stored if _digest(stored.to(weight.dtype)) == now[name] else weight
    return any(_digest(weight.to(dtypes.dtype(dtype))) == then[name] for dtype in FLOATS)
