"""Memory that nothing needs any more: when Python looks for it, and when the system gets it back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator

_ALLOCATIONS = 100_000
"""After how many new objects Python looks for garbage among them; its own number is 700."""


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Look for garbage less often in this block.

    What a trace makes lives as long as its graph, and would be looked through again and again: a tenth of the time of
    an export of thousands of operators. Fake tensors have no memory that waits to be freed.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def give_back_freed_memory() -> None:
    """Give the system what is free in the heap: gradients of recorded calls, say, while another process verifies.

    Of the C libraries, glibc keeps such memory in the holes between blocks in use, and has a function for it.
    """
    trim: Callable[[int], int] | None = (
        getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    )
    if trim is not None:
        trim(0)
