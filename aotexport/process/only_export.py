"""Allow one export at a time in a process: the tracer and its patches belong to the process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from aotexport.errors import ExportFailed

_running = threading.Lock()


@contextlib.contextmanager
def only_export() -> Iterator[None]:
    """Refuse to begin while another thread exports.

    Raises:
        ExportFailed: another thread exports.
    """
    if not _running.acquire(blocking=False):
        raise ExportFailed(
            "another thread of this process exports a model, and a process traces one at a time. Export one after the "
            "other, or in processes of their own"
        )
    try:
        yield
    finally:
        _running.release()
