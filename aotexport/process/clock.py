"""The stages of a command: their wall time, processor time and memory, and their names for the caller."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage that has ended.

    Attributes:
        start_s: when it began, in seconds of `time.perf_counter`.
        processor_s: processor time of this process, all threads.
        peak_nbytes: the most memory that the process had resident, from its start to the end of the stage.
        own_nbytes: memory resident at the end of the stage, without mapped files; 0: the system does not tell.
    """

    name: str
    start_s: float
    wall_s: float
    processor_s: float
    peak_nbytes: int
    own_nbytes: int


class Clock:
    """Times stages, one after the other, and tells a callback of each; `current` is empty where none goes on."""

    def __init__(self, progress: Progress = lambda stage: None) -> None:
        self.stages: list[Stage] = []
        self.current = ""
        self._start = (0.0, 0.0)
        self._progress = progress

    def stage(self, name: str) -> None:
        """Begin a stage, and end the one before it."""
        self.end()
        self._progress(name)
        self.current, self._start = name, (time.perf_counter(), time.process_time())

    def count(self, done: int, of: int) -> None:
        """Report the progress of the current stage, to a callback that has a `count`."""
        tell = getattr(self._progress, "count", None)
        if tell is not None:
            tell(done, of)

    def end(self) -> None:
        """End the current stage, if there is one."""
        if not self.current:
            return
        wall, processor = self._start
        ended = Stage(
            name=self.current,
            start_s=wall,
            wall_s=time.perf_counter() - wall,
            processor_s=time.process_time() - processor,
            peak_nbytes=peak_memory_nbytes(),
            own_nbytes=_own_memory_nbytes(),
        )
        self.stages.append(ended)
        self.current = ""

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by stage; a stage that began several times has one entry."""
        found: dict[str, float] = {}
        for stage in self.stages:
            found[stage.name] = found.get(stage.name, 0.0) + stage.wall_s
        return found


def peak_memory_nbytes() -> int:
    """Return the most memory that this process has had resident, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _own_memory_nbytes() -> int:
    if sys.platform != "linux":
        return 0
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * resource.getpagesize()
