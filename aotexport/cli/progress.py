"""Progress on standard error: a line per stage."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from aotexport.process.clock import Clock


class Progress(Clock):
    """Shows the stages of a command; call it with the name of each stage as it begins."""

    def __init__(self, *, quiet: bool = False) -> None:
        """Begin with no stage."""
        super().__init__()
        self._quiet = quiet
        self._console = Console(file=sys.stderr, highlight=False)
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(done=error is None)

    def __call__(self, stage: str) -> None:
        """Begin a stage; the one before it is done."""
        self._end(done=True)
        if not self._quiet and self._console.is_terminal:
            self._status = self._console.status(Text(stage))
            self._status.start()
        elif not self._quiet:
            self._console.print(Text(stage), soft_wrap=True)
        self.stage(stage)

    def count(self, done: int, of: int) -> None:
        """Show how far the current stage is, on a terminal."""
        if self._status is not None:
            self._status.update(Text(f"{self.current} ({done}/{of})"))

    def _end(self, *, done: bool) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        name, wall_s = self.current, self.end()
        if name and done and not self._quiet and self._console.is_terminal:
            self._console.print(Text(f"{wall_s:7.1f} s  {name}", style="dim"))
