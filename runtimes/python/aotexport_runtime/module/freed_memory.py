"""Makes the C library's allocator keep the memory that calls free; see docs/decisions/0005."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

KEPT_NBYTES = 256 << 20
"""Most freed memory that glibc keeps; after a call, no more than the call has used."""

_LARGEST_MAPPED_NBYTES = 32 << 20
"""Size of blocks from which on glibc always maps them and gives them back; the most that glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, of glibc's `malloc.h`."""

_OWN_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user configures the allocator."""


def keep_freed_memory() -> None:
    """Let glibc reuse the memory that calls free, instead of giving it back, unless the user configured it."""
    if sys.platform != "linux" or any(name in os.environ for name in _OWN_CHOICES):
        return
    # Other C libraries of Linux have no such function.
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Setting one alone would leave the other at a start value that is far too low.
        mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED_NBYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_NBYTES)
