"""Write state tensors to safetensors files: each storage once, ties and overlaps kept, sharded above a size.

A contiguous tensor alone in its storage is stored under its FQN; another one as the flat span of storage it needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aotexport.errors import ExportFailed
from aotexport.model.memory_snapshots import MemorySnapshot, bytes_of, in_file
from aotexport.model.state import State, StateEntry
from aotexport.model.tensor_kinds import is_plain_class
from aotexport.values.subclasses import encode_subclass
from aotexport_runtime.bundle.weights import parts_of
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.validate.arguments import span_end
from aotexport_runtime.validate.trees import count_parts
from aotexport_runtime.values.subclasses import inner_tensors, is_wrapper, parts

SHARD_NBYTES = 512 * 1024**2
"""Size above which weights are split: digests of several files are compared at a time."""


@dataclass(frozen=True)
class _StoredTensor:
    key: str
    tensor: torch.Tensor
    constant: bool


def write_weights(state: State, directory: Path, *, shard_nbytes: int = SHARD_NBYTES) -> tuple[StateTensor, ...]:
    """Write the state below `directory` and return its manifest entries.

    Persistent tensors go to `weights/model.safetensors` (or shards with an index), the rest to
    `weights/constants.safetensors`. A file has at most `shard_nbytes`; a single larger tensor has a file of its own.
    """
    entries: list[tuple[StateEntry, _StoredTensor, bool, int]] = []
    apart = [part for entry in state.entries for part in _apart(entry)]
    for group in _by_storage(apart):
        entries += _store(group)
    order = {id(entry): index for index, entry in enumerate(apart)}
    entries.sort(key=lambda item: order[id(item[0])])
    unique = {item[1].key: item[1] for item in entries}
    files = _write(list(unique.values()), directory / "weights", shard_nbytes)
    places = iter([_place(*item, files) for item in entries])
    return tuple(_record(entry, places) for entry in state.entries)


def _apart(entry: StateEntry) -> list[StateEntry]:
    """Return `entry`, or an entry per plain tensor of a tensor subclass, named `<name>.<attribute>`."""
    if not is_wrapper(entry.tensor):
        return [entry]
    return [
        part
        for name, inner in inner_tensors(entry.tensor).items()
        for part in _apart(replace(entry, tensor=inner, names=[f"{entry.names[0]}.{name}"]))
    ]


def _place(entry: StateEntry, stored: _StoredTensor, whole: bool, offset: int, files: dict[str, str]) -> dict[str, Any]:
    """Return the place of a plain tensor in the files, as the fields of its record."""
    return {
        "file": f"weights/{files[stored.key]}",
        "key": stored.key,
        "dtype": str(entry.tensor.dtype).removeprefix("torch."),
        "shape": tuple(entry.tensor.shape),
        "stride": tuple(entry.tensor.stride()),
        "offset": offset,
        "whole": whole,
    }


def _record(entry: StateEntry, places: Iterator[dict[str, Any]]) -> StateTensor:
    tensor = entry.tensor
    subclass = encode_subclass(tensor, f"`{entry.names[0]}`")
    if subclass is None:
        where: dict[str, Any] = next(places)
    else:
        where = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tuple(tensor.shape),
            "stride": tuple(tensor.stride()),
            "subclass": subclass,
            "parts": tuple(StoredPart(**next(places)) for _ in range(count_parts(subclass))),
        }
    return StateTensor(
        name=entry.names[0],
        tied=tuple(entry.names[1:]),
        role=entry.role,
        persistent=entry.persistent,
        requires_grad=tensor.requires_grad,
        **where,
    )


def _by_storage(entries: Iterable[StateEntry]) -> list[list[StateEntry]]:
    groups: dict[tuple[object, int], list[StateEntry]] = {}
    for index, entry in enumerate(entries):
        if not is_plain_class(type(entry.tensor)):
            raise ExportFailed(
                f"`{entry.names[0]}` is a `{type(entry.tensor).__name__}`, a tensor subclass that a bundle cannot hold"
            )
        if entry.tensor.is_conj() or entry.tensor.is_neg():
            raise ExportFailed(
                f"`{entry.names[0]}` is a conjugated or negated view, which a bundle cannot hold; give it values of "
                "its own (`.resolve_conj().resolve_neg()`)"
            )
        pointer = entry.tensor.untyped_storage().data_ptr()
        alone = pointer == 0 or entry.tensor.numel() == 0
        groups.setdefault((str(entry.tensor.device), -index - 1 if alone else pointer), []).append(entry)
    return list(groups.values())


def _store(group: list[StateEntry]) -> list[tuple[StateEntry, _StoredTensor, bool, int]]:
    first, spans = group[0], [_span(entry.tensor) for entry in group]
    if len(group) > 1 and all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(spans) for b in spans[i + 1 :]):
        return [stored for entry in group for stored in _store([entry])]
    if len({entry.tensor.dtype for entry in group}) > 1:
        raise ExportFailed(f"`{first.names[0]}` and `{group[1].names[0]}` share memory with different dtypes")
    tensor, constant = first.tensor.detach(), not any(entry.persistent for entry in group)
    if len(group) == 1 and (tensor.is_contiguous() or tensor.numel() == 0):
        return [(first, _StoredTensor(first.names[0], tensor.contiguous(), constant), True, 0)]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    stored = _StoredTensor(first.names[0], bytes_of(tensor, low, high - low).view(tensor.dtype), constant)
    return [(entry, stored, False, int(entry.tensor.storage_offset()) - low) for entry in group]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    low = int(tensor.storage_offset()) if tensor.numel() else 0
    return low, span_end(tensor.shape, tensor.stride(), low)


def _write(stored: list[_StoredTensor], directory: Path, shard_nbytes: int) -> dict[str, str]:
    directory.mkdir(exist_ok=True)
    files: dict[str, str] = {}
    constants = [item for item in stored if item.constant]
    if constants:
        _save(constants, directory / "constants.safetensors")
        files.update({item.key: "constants.safetensors" for item in constants})
    shards = _shards([item for item in stored if not item.constant], shard_nbytes)
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, directory / name)
        files.update({item.key: name for item in shard})
    if len(shards) > 1:
        _write_index(shards, files, directory)
    return files


def _shards(stored: list[_StoredTensor], limit: int) -> list[list[_StoredTensor]]:
    shards: list[list[_StoredTensor]] = []
    room = 0
    for item in stored:
        if not shards or item.tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= item.tensor.nbytes
    return shards


def _save(stored: list[_StoredTensor], path: Path) -> None:
    tensors = {item.key: _storable(item.tensor) for item in sorted(stored, key=lambda item: item.key)}
    save_file(tensors, path, metadata={"format": "pt"})


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of a dtype that safetensors has, on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.numel() or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # safetensors refuses tensors that share storage; these are disjoint parts of one. The memory stays the same.
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(array).view(tensor.dtype).reshape(tensor.shape)


def tensor_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Return the range of bytes of each tensor in a safetensors file, by key."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    ranges = {key: entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"}
    return {key: (8 + length + begin, 8 + length + end) for key, (begin, end) in ranges.items()}


def _write_index(shards: list[list[_StoredTensor]], files: dict[str, str], directory: Path) -> None:
    weight_map = {item.key: files[item.key] for shard in shards for item in shard}
    total = sum(item.tensor.nbytes for shard in shards for item in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def weights_as_snapshots(state: State, records: Iterable[StateTensor], directory: Path) -> Iterator[None]:
    """Set `state.snapshots` to the contents of the files, for the block.

    `records` are from `write_weights`, and the state is unchanged since.
    """
    tensors = [part for entry in state.entries for part in parts(entry.tensor)]
    places = [place for record in records for place in parts_of(record)]
    with contextlib.ExitStack() as opened:
        names = {place.file for place in places}
        files = {name: opened.enter_context((directory / name).open("rb")) for name in names}
        ranges = {name: tensor_ranges(directory / name) for name in names}
        snapshots: dict[tuple[str, str], MemorySnapshot] = {}
        for tensor, place in zip(tensors, places, strict=True):
            if not tensor.numel() or (place.file, place.key) in snapshots:
                continue
            start, end = ranges[place.file][place.key]
            first = int(tensor.storage_offset()) - place.offset
            stored = bytes_of(tensor, first, (end - start) // tensor.element_size())
            snapshots[place.file, place.key] = in_file(stored, files[place.file], start)
        state.snapshots = [*snapshots.values()]
        try:
            yield
        finally:
            state.snapshots = None
