"""Snapshots of a model's memory, byte by byte, to compare it and put it back: a copy, or a file of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader

import torch

from aotexport_runtime.validate.arguments import span_end

_PART_NBYTES = 8 << 20
_WORD_NBYTES = 8


@dataclass(frozen=True)
class MemorySnapshot:
    """A span of a storage, as bytes of the storage itself, and its earlier bytes.

    `parts` returns these in parts of `_PART_NBYTES`, each of which is valid until the next.
    """

    memory: torch.Tensor
    parts: Callable[[], Iterable[torch.Tensor]]

    def is_unchanged(self) -> bool:
        """Return whether the memory holds the same bytes."""
        return self._has_room() and all(_equal(now, before) for now, before in self._pairs())

    def put_back(self) -> None:
        """Write the earlier bytes to the memory."""
        if not self._has_room():
            storage = self.memory.untyped_storage()
            storage.resize_(_end(self.memory))
        for now, before in self._pairs():
            if not _equal(now, before):
                now.copy_(before)

    def _has_room(self) -> bool:
        """Return whether the storage is still as large as the span needs."""
        return self.memory.untyped_storage().nbytes() >= _end(self.memory)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for now, before in zip(self.memory.split(_PART_NBYTES), self.parts(), strict=True):
            yield now, before.to(now.device)


def copied(memory: torch.Tensor) -> MemorySnapshot:
    """Return a snapshot of a span of bytes by a copy."""
    copy = memory.clone()
    return MemorySnapshot(memory, lambda: copy.split(_PART_NBYTES))


def in_file(memory: torch.Tensor, file: BufferedReader, offset: int) -> MemorySnapshot:
    """Return a snapshot of a span by an open file that holds the same bytes from `offset` on."""

    def parts() -> Iterator[torch.Tensor]:
        buffer = torch.empty(min(memory.numel(), _PART_NBYTES), dtype=torch.uint8)
        for start in range(0, memory.numel(), _PART_NBYTES):
            part = buffer[: memory.numel() - start]
            file.seek(offset + start)
            file.readinto(part.numpy().data)
            yield part

    return MemorySnapshot(memory, parts)


def _end(memory: torch.Tensor) -> int:
    return int(memory.storage_offset()) + memory.numel()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two spans of equal length are equal; comparing words is several times as fast as bytes."""
    if any(size % _WORD_NBYTES for size in (len(one), one.storage_offset(), other.storage_offset())):
        return torch.equal(one, other)
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


# --- memory of tensors ------------------------------------------------------------------------------------


def bytes_of(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return `count` elements of a strided tensor's storage, from element `start` on, as bytes without a copy."""
    size = tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        return empty.set_(tensor.untyped_storage(), start * size, (count * size,), (1,))


def spans_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of tensors, as bytes without a copy; shared memory is returned once."""
    reached: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            key = tensor.device, tensor.untyped_storage().data_ptr()
            count = span_end(tensor.shape, tensor.stride(), 0)
            reached.setdefault(key, []).append(bytes_of(tensor, int(tensor.storage_offset()), count))
    return [span for spans in reached.values() for span in _merged(spans)]


def _merged(spans: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield spans of one storage, overlapping ones merged."""
    spans = sorted(spans, key=lambda span: span.storage_offset())
    current = spans[0]
    for span in spans[1:]:
        if span.storage_offset() >= _end(current):
            yield current
            current = span
        elif _end(span) > _end(current):
            start = int(current.storage_offset())
            current = bytes_of(current, start, _end(span) - start)
    yield current
