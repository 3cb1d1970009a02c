"""The stages of an export: their wall time, and their names for the caller."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str], None]


class Clock:
    """Wall time per stage, told to the progress callback."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._current: tuple[str, float] | None = None

    @property
    def current(self) -> str:
        """Name of the current stage."""
        return "" if self._current is None else self._current[0]

    def stage(self, name: str) -> None:
        """Begin a stage, and end the one before it."""
        self.finish()
        self._progress(name)
        self._current = (name, time.perf_counter())

    def count(self, done: int, of: int) -> None:
        """Report the progress of the current stage, to a callback that has a `count`."""
        tell = getattr(self._progress, "count", None)
        if tell is not None:
            tell(done, of)

    def finish(self) -> dict[str, float]:
        """End the current stage; return the seconds of every stage."""
        if self._current is not None:
            name, start = self._current
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._current = None
        return self._seconds
