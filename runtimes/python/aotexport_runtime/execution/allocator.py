"""What the C library's allocator does with memory that was freed. Others than glibc stay as they are."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_GLIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

KEPT_NBYTES = 256 << 20
"""Most freed memory that glibc keeps; after a call, no more than the call has used."""

_PARAMETERS = {-3: 32 << 20, -1: KEPT_NBYTES}
"""Of `mallopt`: from which size on blocks are mapped (the most that glibc accepts), and what is kept; setting one alone
would leave the other at a start value that is far too low."""

_OWN_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user configures the allocator."""


def keep_freed_memory() -> None:
    """Let glibc reuse the memory that calls free, instead of giving it back, unless the user configured it."""
    if hasattr(_GLIBC, "mallopt") and not any(name in os.environ for name in _OWN_CHOICES):
        for parameter, value in _PARAMETERS.items():
            _GLIBC.mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Give memory that glibc keeps back to the system: after work that takes far more of it than calls do."""
    if hasattr(_GLIBC, "malloc_trim"):
        _GLIBC.malloc_trim(0)
