"""Progress on standard error: a line per stage, with a spinner and times where a person is watching."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from aotexport.process.clock import Clock, Stage


class Progress:
    """Shows the stages of a command; call it with the name of each stage as it begins."""

    def __init__(self, *, quiet: bool = False, profile: Path | None = None) -> None:
        """Begin with no stage.

        The stages are written to the file `profile` when the command ends, however it ends; see `write_profile`.
        """
        self._clock = Clock()
        self._quiet = quiet
        self._profile = profile
        self._console = Console(file=sys.stderr, highlight=False)
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(done=error is None)
        if self._profile is not None:
            write_profile(self._clock.stages, self._profile)

    def __call__(self, stage: str) -> None:
        """Begin a stage; the one before it is done."""
        self._end(done=True)
        if not self._quiet and self._console.is_terminal:
            self._status = self._console.status(Text(stage))
            self._status.start()
        elif not self._quiet:
            self._console.print(Text(stage), soft_wrap=True)
        self._clock.stage(stage)

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time per finished stage."""
        return self._clock.seconds

    @property
    def own_nbytes(self) -> int:
        """The most memory without mapped files at the end of a stage; 0: the system does not tell."""
        return max((stage.own_nbytes for stage in self._clock.stages), default=0)

    def count(self, done: int, of: int) -> None:
        """Show how far the current stage is, on a terminal."""
        if self._status is not None:
            self._status.update(Text(f"{self._clock.current} ({done}/{of})"))

    def _end(self, *, done: bool) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if not self._clock.current:
            return
        self._clock.end()
        ended = self._clock.stages[-1]
        if done and not self._quiet and self._console.is_terminal:
            self._console.print(Text(f"{ended.wall_s:7.1f} s  {ended.name}", style="dim"))


def write_profile(stages: Iterable[Stage], path: Path) -> None:
    """Write stages in Chrome's Trace Event Format, which Perfetto and `chrome://tracing` open.

    Times are in microseconds. Each stage has its processor time, in seconds, and the process's peak memory, in bytes.
    """
    process = {"pid": os.getpid(), "tid": 0}
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", **process, "args": {"name": "aotexport"}}]
    for stage in stages:
        start, end = round(stage.start_s * 1e6), round((stage.start_s + stage.wall_s) * 1e6)
        told = {"processor_s": round(stage.processor_s, 3), "peak_memory_nbytes": stage.peak_nbytes}
        told["own_memory_nbytes"] = stage.own_nbytes
        events.append({"name": stage.name, "ph": "X", "ts": start, "dur": end - start, **process, "args": told})
        peak = {"nbytes": stage.peak_nbytes}
        events.append({"name": "peak memory", "ph": "C", "ts": end, **process, "args": peak})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n")
