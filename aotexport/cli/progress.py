"""Progress on standard error: a line per stage, with a spinner and times where a person is watching."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress:
    """Shows the stages of a command; call it with the name of each stage as it begins.

    Attributes:
        seconds: wall time per finished stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._console = Console(file=sys.stderr, highlight=False)
        self._status: Status | None = None
        self._current: tuple[str, float] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(done=error is None)

    def __call__(self, stage: str) -> None:
        """Begin a stage; the one before it is done."""
        self._end(done=True)
        self._current = (stage, time.perf_counter())
        if self._console.is_terminal:
            self._status = self._console.status(Text(stage))
            self._status.start()
        else:
            self._console.print(Text(stage), soft_wrap=True)

    def count(self, done: int, of: int) -> None:
        """Show how far the current stage is, on a terminal."""
        if self._status is not None and self._current is not None:
            self._status.update(Text(f"{self._current[0]} ({done}/{of})"))

    def _end(self, *, done: bool) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._current is None:
            return
        stage, start = self._current
        self._current = None
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        if done and self._console.is_terminal:
            self._console.print(Text(f"{self.seconds[stage]:7.1f} s  {stage}", style="dim"))
