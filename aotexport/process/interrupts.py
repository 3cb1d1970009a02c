"""Delay interrupts (Ctrl-C) while something is put back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt in the block until its end.

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
