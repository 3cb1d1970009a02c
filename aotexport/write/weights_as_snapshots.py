"""Use the written weights as snapshots of a model's memory: calls for real then need no copy of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from aotexport.model.memory_snapshots import MemorySnapshot, bytes_of, copied, in_file, spans_of
from aotexport.model.state import State
from aotexport.write.weights import tensor_ranges
from aotexport_runtime.bundle.weights import parts_of
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.values.subclasses import parts


@contextlib.contextmanager
def weights_as_snapshots(state: State, records: Iterable[StateTensor], directory: Path) -> Iterator[None]:
    """Set `state.snapshots` to the contents of the files, for the block.

    Memory whose bytes differ from the file's (the values of a conjugated view) gets a copy instead. `records` are from
    `write_weights`, and the state is unchanged since.
    """
    tensors = [part for entry in state.entries for part in parts(entry.tensor)]
    places = [place for record in records for place in parts_of(record)]
    with contextlib.ExitStack() as opened:
        names = {place.file for place in places}
        files = {name: opened.enter_context((directory / name).open("rb")) for name in names}
        ranges = {name: tensor_ranges(directory / name) for name in names}
        snapshots: dict[tuple[str, str], MemorySnapshot] = {}
        others: list[torch.Tensor] = []
        for tensor, place in zip(tensors, places, strict=True):
            if not tensor.numel() or (place.file, place.key) in snapshots:
                continue
            start, end = ranges[place.file][place.key]
            first = int(tensor.storage_offset()) - place.offset
            stored = bytes_of(tensor, first, (end - start) // tensor.element_size())
            memory = in_file(stored, files[place.file], start)
            if memory.is_unchanged():
                snapshots[place.file, place.key] = memory
            else:
                others.append(tensor)
        state.snapshots = [*snapshots.values(), *map(copied, spans_of(others))]
        try:
            yield
        finally:
            state.snapshots = None
