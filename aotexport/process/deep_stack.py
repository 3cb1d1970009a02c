"""Deepen the main thread's stack, for freeing long chains of autograd nodes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

NBYTES = 120 << 20
"""Linux leaves 128 MiB of addresses to the main thread's stack, however small its limit is when a process starts."""


@contextlib.contextmanager
def deep_stack() -> Iterator[None]:
    """Let the main thread's stack grow in this block; other threads keep the size they were started with.

    In torch 2.13 freeing the autograd graph of a joint trace recurses one level for each node of a chain: the tensors
    that nodes save are Python objects there, which own the node before. 100,000 operators in a row take more than 8
    MiB, the usual size for threads, and less than 84.
    """
    if sys.platform == "win32":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == resource.RLIM_INFINITY or soft >= NBYTES:
        yield
        return
    resource.setrlimit(resource.RLIMIT_STACK, (NBYTES if hard == resource.RLIM_INFINITY else min(NBYTES, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
