"""What the allocator of the C library does with memory that calls free; see docs/decisions/0005."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

KEPT_NBYTES = 256 << 20
"""What glibc keeps of freed memory; of each call no more than that call has used."""

_LARGEST_MAPPED_NBYTES = 32 << 20
"""The most that glibc takes: blocks from this size on are always mapped, and given back."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, of glibc's `malloc.h`."""

_OWN_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment by which a user chooses."""


def keep_freed_memory() -> None:
    """Let glibc use again what calls free, instead of giving it back to the system, unless the user has chosen."""
    if sys.platform != "linux" or any(name in os.environ for name in _OWN_CHOICES):
        return
    # Other C libraries of Linux have no such function.
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Either alone would leave the other at a start value that is far too low.
        mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED_NBYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_NBYTES)
