"""Blocks in which the exporting process behaves otherwise: interrupts, warnings, garbage, stack, exports."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from aotexport.errors import ExportFailed

_running = threading.Lock()

_ALLOCATIONS = 100_000
"""Number of new objects after which Python looks for garbage among them; its own number is 700."""

STACK_NBYTES = 120 << 20
"""Linux leaves 128 MiB of addresses to the main thread's stack, however small its limit is when a process starts."""


@contextlib.contextmanager
def only_export() -> Iterator[None]:
    """Refuse to begin while another thread exports: the tracer and its patches belong to the process."""
    if not _running.acquire(blocking=False):
        raise ExportFailed(
            "another thread of this process exports a model, and a process traces one at a time. Export one after the "
            "other, or in processes of their own"
        )
    try:
        yield
    finally:
        _running.release()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt (Ctrl-C) in the block until its end.

    Python raises interrupts in its main thread alone, and handlers can be set only there.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    if not callable(handler):
        yield
        return
    pending: list[Any] = []
    signal.signal(signal.SIGINT, lambda *interrupt: pending.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Hide warnings, and messages of these loggers below critical errors: the user can do nothing about them."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Look for garbage less often: a trace's objects live as long as its graph, and the searches take a tenth of it."""
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

    What the imports of torch and of model libraries have made would be searched twice in an export, for 0.3 s each.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def deep_stack() -> Iterator[None]:
    """Let the main thread's stack grow in this block; other threads keep the size they were started with.

    In torch 2.13 freeing the autograd graph of a joint trace recurses a level for each node of a chain. 100,000
    operators in a row take more than 8 MiB, the usual size, and less than 84.
    """
    if sys.platform == "win32":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = STACK_NBYTES if hard == resource.RLIM_INFINITY else min(STACK_NBYTES, hard)
    grows = soft != resource.RLIM_INFINITY and soft < most
    resource.setrlimit(resource.RLIMIT_STACK, (most if grows else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
