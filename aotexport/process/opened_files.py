"""Note the files that this process opens."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR


class OpenedFiles:
    """The files that were opened to be read, from the moment when this was made.

    Attributes:
        since_ns: that moment, in nanoseconds of the system's clock.
    """

    def __init__(self) -> None:
        self.since_ns = time.time_ns()
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        # No audit hook can be taken away: this is for processes that do one export.
        sys.addaudithook(self._note)

    def read(self) -> list[str]:
        """Return the absolute paths of the files that were read, and not written before, in order."""
        return list(self._read)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "ctypes.dlopen") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        with contextlib.suppress(OSError, ValueError):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if path.startswith("/proc/self/fd/"):
                path = os.path.realpath(path)
            if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
                self._written.add(path)
            elif path not in self._written:
                self._read[path] = None
