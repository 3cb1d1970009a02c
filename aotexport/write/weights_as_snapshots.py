"""Use the written weights as snapshots of a model's memory: calls for real then need no copy of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from aotexport.model.memory_snapshots import MemorySnapshot, bytes_of, copied, in_file, spans_of
from aotexport.model.state import State
from aotexport_runtime.bundle.weights import parts_of
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.values.subclasses import parts

_LENGTH_NBYTES = 8
"""A safetensors file begins with the length of its header."""


@contextlib.contextmanager
def weights_as_snapshots(state: State, records: Iterable[StateTensor], directory: Path) -> Iterator[None]:
    """Set `state.snapshots` to the contents of the files, for the block.

    Memory whose bytes differ from the file's (the values of a conjugated view) gets a copy instead. `records` are from
    `write_weights`, and the state is unchanged since.
    """
    tensors = [part for entry in state.entries for part in parts(entry.tensor)]
    places = [place for record in records for place in parts_of(record)]
    with contextlib.ExitStack() as opened:
        files = {name: _File(opened.enter_context((directory / name).open("rb"))) for name in {p.file for p in places}}
        snapshots: dict[tuple[str, str], MemorySnapshot] = {}
        others: list[torch.Tensor] = []
        for tensor, place in zip(tensors, places, strict=True):
            if not tensor.numel() or (place.file, place.key) in snapshots:
                continue
            memory = files[place.file].snapshot(tensor, place)
            if memory.is_unchanged():
                snapshots[place.file, place.key] = memory
            else:
                others.append(tensor)
        state.snapshots = [*snapshots.values(), *map(copied, spans_of(others))]
        try:
            yield
        finally:
            state.snapshots = None


class _File:
    """An open safetensors file, with the places of its tensors."""

    def __init__(self, stream: BinaryIO) -> None:
        length = int.from_bytes(stream.read(_LENGTH_NBYTES), "little")
        header = json.loads(stream.read(length))
        self._stream = stream
        self._places: dict[str, list[int]] = {
            key: [_LENGTH_NBYTES + length + offset for offset in entry["data_offsets"]]
            for key, entry in header.items()
            if key != "__metadata__"
        }

    def snapshot(self, tensor: torch.Tensor, place: StateTensor | StoredPart) -> MemorySnapshot:
        """Return a snapshot of the memory stored under the key of `place`, of which `tensor` is a part."""
        start, end = self._places[place.key]
        first = int(tensor.storage_offset()) - place.offset
        memory = bytes_of(tensor, first, (end - start) // tensor.element_size())
        return in_file(memory, self._stream, start)
