"""The stages of a command: their wall time and memory, and their names for the caller."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str], None]


class Clock:
    """Times stages, one after the other, and tells a callback of each.

    Attributes:
        current: the stage that goes on; empty: none does.
        seconds: wall time by stage; one that began several times has one entry.
        own_nbytes: the most memory without mapped files at the end of a stage; 0: the system does not tell.
    """

    def __init__(self, progress: Progress = lambda stage: None) -> None:
        self.current, self.seconds, self.own_nbytes = "", dict[str, float](), 0
        self._start = 0.0
        self._progress = progress

    def stage(self, name: str) -> None:
        """Begin a stage, and end the one before it."""
        self.end()
        self._progress(name)
        self.current, self._start = name, time.perf_counter()

    def count(self, done: int, of: int) -> None:
        """Report the progress of the current stage, to a callback that has a `count`."""
        tell = getattr(self._progress, "count", None)
        if tell is not None:
            tell(done, of)

    def end(self) -> float:
        """End the current stage, if there is one; return its wall time."""
        if not self.current:
            return 0.0
        wall_s = time.perf_counter() - self._start
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + wall_s
        self.own_nbytes, self.current = max(self.own_nbytes, _own_memory_nbytes()), ""
        return wall_s


def peak_memory_nbytes() -> int:
    """Return the most memory that this process has had resident, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _own_memory_nbytes() -> int:
    if sys.platform != "linux":
        return 0
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * resource.getpagesize()
