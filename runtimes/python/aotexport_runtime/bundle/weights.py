"""State tensors from safetensors files, mapped or read.

A mapped file is private to the process: training in place never reaches the file. No tensor reaches beyond the data
that its file stores under its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize, safe_open

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.schema.subclasses import Subclass
from aotexport_runtime.validate.bounds import span_end
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import Form


def load_tensors(
    bundle: Bundle, state: Iterable[StateTensor], form: Callable[[Subclass], Form], *, mapped: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensor of each entry, by its first name.

    Args:
        bundle: where the files are.
        state: entries of the manifest.
        form: returns the structure of a tensor subclass with its class.
        mapped: map the files into memory; False: read them (for network disks).

    Returns:
        Tensors on the CPU. Entries whose storages overlapped at export overlap again.

    Raises:
        BundleInvalid: a file is broken, or an entry does not fit the file's data.
        NotSupported: this torch lacks a dtype.
    """
    entries = list(state)
    stored = iter(load_parts(bundle, [part for entry in entries for part in parts_of(entry)], mapped=mapped))
    return {
        entry.name: next(stored) if entry.subclass is None else form(entry.subclass).make(stored, {})
        for entry in entries
    }


def parts_of(entry: StateTensor) -> tuple[StateTensor | StoredPart, ...]:
    """Return the records of an entry's plain tensors: the entry, or the parts of a tensor subclass."""
    return (entry,) if entry.subclass is None else entry.parts


def load_parts(
    bundle: Bundle, records: Iterable[StateTensor | StoredPart], *, mapped: bool = True
) -> list[torch.Tensor]:
    """Return the plain tensor of each record; see `load_tensors`."""
    stored = _StoredTensors(bundle, mapped)
    return [_restore(record, stored.get(record.file, record.key)) for record in records]


def read_tensors(path: Path, *, where: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors file, read into memory.

    Args:
        path: the file.
        where: its name in the bundle, for errors.

    Raises:
        BundleInvalid: no safetensors file.
        NotSupported: this torch lacks a dtype.
    """
    try:
        stored = deserialize(path.read_bytes())
    except SafetensorError as error:
        raise BundleInvalid(f"not a safetensors file: {error}", where=where) from None
    return {key: _from_bytes(value, where) for key, value in stored}


class _StoredTensors:
    """The stored tensors, each loaded once, so that entries of one key share its storage."""

    def __init__(self, bundle: Bundle, mapped: bool) -> None:
        self._bundle = bundle
        self._mapped = mapped
        self._files: dict[str, Callable[[str], torch.Tensor]] = {}
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}

    def get(self, file: str, key: str) -> torch.Tensor:
        if (file, key) not in self._tensors:
            if file not in self._files:
                self._files[file] = self._open(file)
            try:
                self._tensors[file, key] = self._files[file](key)
            except KeyError:
                raise BundleInvalid(f"no tensor {key[:80]!r}", where=file) from None
            except SafetensorError as error:
                raise BundleInvalid(f"no tensor {key[:80]!r}: {error}", where=file) from None
        return self._tensors[file, key]

    def _open(self, file: str) -> Callable[[str], torch.Tensor]:
        with self._bundle.opened(file) as path:
            if not self._mapped:
                return read_tensors(path, where=file).__getitem__
            try:
                opened: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise BundleInvalid(f"not a safetensors file: {error}", where=file) from None
            return opened.get_tensor


_DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
"""The format's name per dtype of safetensors; its own reader for torch lacks some."""


def _from_bytes(stored: dict[str, Any], where: str) -> torch.Tensor:
    name = _DTYPES.get(stored["dtype"])
    if name is None:
        raise BundleInvalid(f"dtype {stored['dtype']} is none of the format's", where=where)
    if not stored["data"]:
        return torch.empty(stored["shape"], dtype=dtypes.dtype(name))
    return torch.frombuffer(stored["data"], dtype=dtypes.dtype(name)).reshape(stored["shape"])


def _restore(entry: StateTensor | StoredPart, stored: torch.Tensor) -> torch.Tensor:
    key = f"{entry.key[:80]!r}"
    dtype = dtypes.dtype(entry.dtype)
    if stored.data_ptr() % stored.element_size():
        # Kernels may load whole vectors from addresses that they assume to be aligned.
        raise BundleInvalid(f"{key} does not begin at a multiple of its element size", where=entry.file)
    if dtype.is_complex and stored.dtype == dtype.to_real() and stored.shape[-1:] == (2,):
        stored = torch.view_as_complex(stored)
    if stored.dtype != dtype:
        raise BundleInvalid(f"{key} is {dtypes.name_of(stored.dtype)}, not {entry.dtype}", where=entry.file)
    if entry.whole and tuple(stored.shape) != entry.shape:
        raise BundleInvalid(f"{key} has shape {list(stored.shape)}, not {list(entry.shape)}", where=entry.file)
    if 0 in entry.shape:
        return torch.empty_strided(entry.shape, entry.stride, dtype=dtype)
    # `set_` would enlarge a storage that is too small.
    if span_end(entry.shape, entry.stride, entry.offset) > stored.numel():
        name = entry.name if isinstance(entry, StateTensor) else entry.key
        raise BundleInvalid(f"state {name[:80]!r} reaches past the end of {key}", where=entry.file)
    offset = entry.offset + stored.storage_offset()
    return torch.empty(0, dtype=dtype).set_(stored.untyped_storage(), offset, entry.shape, entry.stride)
