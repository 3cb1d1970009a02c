"""Tune when Python looks for garbage, and when the system gets freed memory back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator

_ALLOCATIONS = 100_000
"""Number of new objects after which Python looks for garbage among them; its own number is 700."""


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Look for garbage less often in this block.

    Objects of a trace live as long as its graph, and would be searched again and again: a tenth of the time of an
    export of thousands of operators. Fake tensors and records have no memory that waits to be freed.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def searched_for_new_garbage() -> Iterator[None]:
    """Look for garbage only among objects that are made in this block; does nothing if the process has frozen objects.

    What the imports of torch and of model libraries have made, some million objects, would be searched once or twice in
    an export, for 0.3 s each. Garbage from before the block is freed after it.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back_freed_memory() -> None:
    """Give free memory of the heap back to the system, for the process that verifies: gradients of recorded calls, say.

    Of the C libraries, glibc keeps such memory in the holes between blocks in use, and has a function for it.
    """
    trim: Callable[[int], int] | None = (
        getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    )
    if trim is not None:
        trim(0)
