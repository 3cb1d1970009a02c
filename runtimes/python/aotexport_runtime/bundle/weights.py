"""State tensors from safetensors files, read or mapped.

A file that is read is compared with its digest in memory, and can change or go. A mapped file takes no memory of the
process, and training in place never reaches it; who writes into it changes the weights, who truncates it ends the
process. No tensor reaches beyond the data that its file stores under its key.
"""

from __future__ import annotations

import array
import math
import mmap
import os
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, deserialize, safe_open

from aotexport_runtime.bundle.directory import at_descriptor
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.schema.subclasses import Subclass
from aotexport_runtime.validate.bounds import span_end
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import Form


def load_tensors(
    bundle: Bundle, state: Iterable[StateTensor], form: Callable[[Subclass], Form], *, mapped: bool | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensor of each entry, by its first name.

    Args:
        bundle: where the files are.
        state: entries of the manifest.
        form: returns the structure of a tensor subclass with its class.
        mapped: map the files into memory; False: read them; None: map those that nobody can change.

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
    bundle: Bundle, records: Iterable[StateTensor | StoredPart], *, mapped: bool | None = None
) -> list[torch.Tensor]:
    """Return the plain tensor of each record; see `load_tensors`."""
    stored = _StoredTensors(bundle, mapped)
    return [_restore(record, stored.get(record.file, record.key)) for record in records]


def read_tensors(data: bytes, *, where: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors file.

    Args:
        data: the file.
        where: its name, for errors.

    Raises:
        BundleInvalid: no safetensors file.
        NotSupported: this torch lacks a dtype.
    """
    try:
        stored = deserialize(data)
    except SafetensorError as error:
        raise BundleInvalid(
            f"not a safetensors file: {error}", where=where, check="tensor-stored/safetensors"
        ) from None
    return {key: _from_bytes(value, where) for key, value in stored}


class _StoredTensors:
    """The stored tensors, each loaded once, so that entries of one key share its storage."""

    def __init__(self, bundle: Bundle, mapped: bool | None) -> None:
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
                raise BundleInvalid(f"no tensor {key[:80]!r}", where=file, check="tensor-stored/key") from None
            except SafetensorError as error:
                raise BundleInvalid(f"no tensor {key[:80]!r}: {error}", where=file, check="tensor-stored/key") from None
        return self._tensors[file, key]

    def _open(self, file: str) -> Callable[[str], torch.Tensor]:
        with self._bundle.opened(file) as path:
            with path.open("rb") as stream:
                if not (_is_immutable(stream) if self._mapped is None else self._mapped):
                    return _Copy(self._bundle, file, stream).get
                if self._bundle.compares_when_read(file):
                    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        self._bundle.compare(file, [data])
            return _opened(path, file).get_tensor


def _opened(path: Path, where: str) -> Any:
    """Return a safetensors file, mapped; the library has checked its header.

    Raises:
        BundleInvalid: it is none.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise BundleInvalid(
            f"not a safetensors file: {error}", where=where, check="tensor-stored/safetensors"
        ) from None


def _check_header(header: bytes, nbytes: int, stream: BinaryIO, where: str) -> None:
    """Let the library check a header, on a file of this process alone: another could be truncated under its mapping."""
    if not hasattr(os, "memfd_create"):
        _opened(Path(stream.name), where)
        return
    descriptor = os.memfd_create("header")
    try:
        os.write(descriptor, header)
        os.ftruncate(descriptor, nbytes)
        _opened(at_descriptor(descriptor, Path()), where)
    finally:
        os.close(descriptor)


class _Copy:
    """The tensors of a safetensors file, read into memory in one piece; no tensor reaches beyond its data."""

    def __init__(self, bundle: Bundle, file: str, stream: BufferedReader) -> None:
        self._file = file
        nbytes = os.fstat(stream.fileno()).st_size
        header = stream.read(8)
        header += stream.read(min(int.from_bytes(header, "little"), nbytes))
        self._data = torch.empty(nbytes - len(header), dtype=torch.uint8)
        array_of_data: Any = self._data.numpy()
        data = memoryview(array_of_data) if len(self._data) else memoryview(b"")
        if _read_into(stream, data) != len(data):
            raise BundleInvalid(f"expected {nbytes} bytes, got fewer", where=file, check="file-differs/size")
        bundle.compare(file, [header, data])
        _check_header(header, nbytes, stream, file)
        self._tensors: dict[str, Any] = msgspec.json.decode(header[8:])
        self._tensors.pop("__metadata__", None)

    def get(self, key: str) -> torch.Tensor:
        stored = msgspec.convert(self._tensors[key], _StoredTensor)
        name = _DTYPES.get(stored.dtype)
        if name is None:
            raise BundleInvalid(
                f"dtype {stored.dtype} is none of the format's", where=self._file, check="tensor-stored/dtype"
            )
        dtype = dtypes.dtype(name)
        begin, end = stored.data_offsets
        count = math.prod(stored.shape)
        # The library has compared these; the file may have changed since.
        if min((begin, *stored.shape)) < 0 or end - begin != count * dtype.itemsize or end > len(self._data):
            raise BundleInvalid(
                f"no tensor {key[:80]!r}: its sizes are not those of its data",
                where=self._file,
                check="tensor-stored/safetensors",
            )
        if not count:
            return torch.empty(stored.shape, dtype=dtype)
        # Each tensor has a storage of its own, as a mapped one.
        return torch.frombuffer(self._data.numpy(), dtype=dtype, count=count, offset=begin).reshape(stored.shape)


class _StoredTensor(msgspec.Struct):
    """An entry in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_into(stream: BufferedReader, data: memoryview) -> int:
    """Read until `data` is full, or the stream ends; return how many bytes."""
    count = 0
    while count < len(data):
        found = stream.readinto(data[count:])
        if not found:
            break
        count += found
    return count


def _is_immutable(stream: BinaryIO) -> bool:
    """Return whether the file system says that nobody can change a file: it has fs-verity, or is immutable."""
    flags = array.array("l", [0])
    try:
        import fcntl

        fcntl.ioctl(stream, _GET_FLAGS, flags)
    except (ImportError, OSError):
        return False
    return bool(flags[0] & (_VERITY | _IMMUTABLE))


_GET_FLAGS, _VERITY, _IMMUTABLE = 0x80086601, 0x00100000, 0x00000010
"""`FS_IOC_GETFLAGS`, `FS_VERITY_FL` and `FS_IMMUTABLE_FL` of Linux."""

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
        raise BundleInvalid(
            f"dtype {stored['dtype']} is none of the format's", where=where, check="tensor-stored/dtype"
        )
    if not stored["data"]:
        return torch.empty(stored["shape"], dtype=dtypes.dtype(name))
    return torch.frombuffer(stored["data"], dtype=dtypes.dtype(name)).reshape(stored["shape"])


def _restore(entry: StateTensor | StoredPart, stored: torch.Tensor) -> torch.Tensor:
    key = f"{entry.key[:80]!r}"
    dtype = dtypes.dtype(entry.dtype)
    if stored.data_ptr() % stored.element_size():
        # Kernels may load whole vectors from addresses that they assume to be aligned.
        raise BundleInvalid(
            f"{key} does not begin at a multiple of its element size", where=entry.file, check="tensor-stored/alignment"
        )
    if dtype.is_complex and stored.dtype == dtype.to_real() and stored.shape[-1:] == (2,):
        stored = torch.view_as_complex(stored)
    if stored.dtype != dtype:
        raise BundleInvalid(
            f"{key} is {dtypes.name_of(stored.dtype)}, not {entry.dtype}", where=entry.file, check="tensor-stored/dtype"
        )
    if entry.whole and tuple(stored.shape) != entry.shape:
        raise BundleInvalid(
            f"{key} has shape {list(stored.shape)}, not {list(entry.shape)}",
            where=entry.file,
            check="tensor-stored/shape",
        )
    if 0 in entry.shape:
        return torch.empty_strided(entry.shape, entry.stride, dtype=dtype)
    # `set_` would enlarge a storage that is too small.
    if span_end(entry.shape, entry.stride, entry.offset) > stored.numel():
        name = entry.name if isinstance(entry, StateTensor) else entry.key
        raise BundleInvalid(
            f"state {name[:80]!r} reaches past the end of {key}", where=entry.file, check="tensor-stored/span"
        )
    offset = entry.offset + stored.storage_offset()
    return torch.empty(0, dtype=dtype).set_(stored.untyped_storage(), offset, entry.shape, entry.stride)
