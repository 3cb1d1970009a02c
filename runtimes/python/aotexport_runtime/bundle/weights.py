"""State tensors from safetensors files, read or mapped; no tensor reaches beyond what its file stores under its key.

What is read is compared with its digest in memory. Who writes to a mapped file changes weights, or ends the process.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, deserialize, safe_open

from aotexport_runtime.bundle.directory import at_descriptor, private_file
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.graph import Subclass
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.validate.arguments import span_end
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import Form

_PART_NBYTES = 16 << 20
"""Of what is read, while the parts before it are hashed."""

_FILES = 4
"""Read at a time."""

_ALIGNMENT = 64
"""Of what is read, as torch aligns memory."""


def load_tensors(
    bundle: Bundle, state: Iterable[StateTensor], form: Callable[[Subclass], Form], *, mapped: bool | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensor of each entry, by its first name, on the CPU; storages that overlapped at export overlap again.

    Args:
        bundle: where the files are.
        state: entries of the manifest.
        form: returns the structure of a tensor subclass with its class.
        mapped: map the files into memory; False: read them; None: map those that nobody can change.

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
    """Return the plain tensor of each record; see `load_tensors`. Those of one key share its storage."""
    records = list(records)
    files = dict.fromkeys(record.file for record in records)
    read = functools.partial(_reader, bundle, mapped)
    with ThreadPoolExecutor(_FILES, "aotexport weights") as pool:
        # A thread costs a small bundle a twentieth of its load.
        opened = dict(zip(files, (pool.map if len(files) > 1 else map)(read, files), strict=True))

    @functools.cache
    def stored(file: str, key: str) -> torch.Tensor:
        try:
            return opened[file](key)
        except (KeyError, SafetensorError) as error:
            reason = f": {error}" if isinstance(error, SafetensorError) else ""
            raise BundleInvalid(f"no tensor {key[:80]!r}{reason}", where=file, check="tensor-stored/key") from None

    return [_restore(record, stored(record.file, record.key)) for record in records]


def read_tensors(data: bytes, *, where: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors file; what is none is refused (`BundleInvalid`), `where` it is."""
    stored = _opened(deserialize, data, where)
    return {key: _tensor(key, each["data"], each["dtype"], each["shape"], where) for key, each in stored}


def _reader(bundle: Bundle, mapped: bool | None, file: str) -> Callable[[str], torch.Tensor]:
    """Return a function from a key to the tensor that a file stores under it."""
    with bundle.stream(file) as stream:
        if not (_is_immutable(stream) if mapped is None else mapped):
            return _copy(bundle, file, stream)
        if file in bundle.compared_by_readers:
            bundle.compare(file, stream)
        return _opened(_mapped, at_descriptor(stream.fileno(), bundle.directory.files / file), file).get_tensor


def _opened(open_: Callable[[Any], Any], source: Any, where: str) -> Any:
    """Return what the library opens, whose header it has checked."""
    try:
        return open_(source)
    except SafetensorError as error:
        message = f"not a safetensors file: {error}"
        raise BundleInvalid(message, where=where, check="tensor-stored/safetensors") from None


_mapped = functools.partial(safe_open, framework="pt")


def _copy(bundle: Bundle, file: str, stream: BufferedReader) -> Callable[[str], torch.Tensor]:
    """Read a file into memory in one piece, for `_reader`; no tensor reaches beyond its data."""
    nbytes = os.fstat(stream.fileno()).st_size
    header = stream.read(8)
    header += stream.read(min(int.from_bytes(header, "little"), nbytes))
    # numpy asks for huge pages, which take half of the time.
    memory: Any = np.empty(nbytes - len(header) + _ALIGNMENT, np.uint8)
    memory = memory[-memory.ctypes.data % _ALIGNMENT :][: nbytes - len(header)]
    data, count, digest = memoryview(memory), 0, hashlib.sha256(header)
    part, compares = data[:0], file in bundle.compared_by_readers
    with ThreadPoolExecutor(1, "aotexport digests") as hashing:
        while found := stream.readinto(data[count : count + _PART_NBYTES]) if len(data) > count else 0:
            if compares and part:
                hashing.submit(digest.update, part)
            part, count = data[count : count + found], count + found
    if count != len(data):
        raise BundleInvalid(f"expected {nbytes} bytes, got fewer", where=file, check="file-differs/size")
    if compares:
        digest.update(part)
        bundle.compare_digest(file, digest.hexdigest())
    # Another file could be truncated under the library's mapping.
    with private_file(header, nbytes) as path:
        _opened(_mapped, path, file)
    tensors: dict[str, Any] = msgspec.json.decode(header[8:])
    tensors.pop("__metadata__", None)

    def get(key: str) -> torch.Tensor:
        begin, end = tensors[key]["data_offsets"]
        return _tensor(key, memory[begin:end], tensors[key]["dtype"], tensors[key]["shape"], file)

    return get


def _tensor(key: str, data: Any, dtype: str, shape: Sequence[int], where: str) -> torch.Tensor:
    """Return a tensor of stored bytes, which it shares; its storage is its own, as that of a mapped one."""
    if dtype not in _DTYPES:
        raise BundleInvalid(f"dtype {dtype} is none of the format's", where=where, check="tensor-stored/dtype")
    found = dtypes.dtype(_DTYPES[dtype])
    # The library has compared these.
    if min(shape, default=0) < 0 or len(data) != math.prod(shape) * found.itemsize:
        message = f"no tensor {key[:80]!r}: its sizes are not those of its data"
        raise BundleInvalid(message, where=where, check="tensor-stored/safetensors")
    return torch.frombuffer(data, dtype=found).reshape(shape) if len(data) else torch.empty(shape, dtype=found)


def _is_immutable(stream: BufferedReader) -> bool:
    """Return whether the file system says that nobody can change a file: it has fs-verity, or is immutable."""
    try:
        import fcntl

        flags = int.from_bytes(fcntl.ioctl(stream, _GET_FLAGS, bytes(8)), "little")
    except (ImportError, OSError):
        return False
    return bool(flags & (_VERITY | _IMMUTABLE))


_GET_FLAGS, _VERITY, _IMMUTABLE = 0x80086601, 0x00100000, 0x00000010
"""`FS_IOC_GETFLAGS`, `FS_VERITY_FL` and `FS_IMMUTABLE_FL` of Linux."""

_WORDS = {"I": "int", "U": "uint", "F": "float"}
_DTYPES = {
    **{f"{letter}{nbits}": f"{word}{nbits}" for letter, word in _WORDS.items() for nbits in (8, 16, 32, 64)},
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
"""The format's name per dtype of safetensors; its own reader for torch lacks some."""


def _restore(entry: StateTensor | StoredPart, stored: torch.Tensor) -> torch.Tensor:
    key, dtype, check = f"{entry.key[:80]!r}", dtypes.dtype(entry.dtype), Place(entry.file).require
    # Kernels may load whole vectors from addresses that they assume to be aligned.
    is_aligned = stored.data_ptr() % stored.element_size() == 0
    check(is_aligned, f"{key} does not begin at a multiple of its element size", "tensor-stored/alignment")
    if dtype.is_complex and stored.dtype == dtype.to_real() and stored.shape[-1:] == (2,):
        stored = torch.view_as_complex(stored)
    check(stored.dtype == dtype, f"{key} is {dtypes.name_of(stored.dtype)}, not {entry.dtype}", "tensor-stored/dtype")
    is_of_shape = not entry.whole or tuple(stored.shape) == entry.shape
    check(is_of_shape, f"{key} has shape {list(stored.shape)}, not {list(entry.shape)}", "tensor-stored/shape")
    if 0 in entry.shape:
        return torch.empty_strided(entry.shape, entry.stride, dtype=dtype)
    # `set_` would enlarge a storage that is too small.
    name = entry.name if isinstance(entry, StateTensor) else entry.key
    is_inside = span_end(entry.shape, entry.stride, entry.offset) <= stored.numel()
    check(is_inside, f"state {name[:80]!r} reaches past the end of {key}", "tensor-stored/span")
    offset = entry.offset + stored.storage_offset()
    return torch.empty(0, dtype=dtype).set_(stored.untyped_storage(), offset, entry.shape, entry.stride)
