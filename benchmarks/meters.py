"""Readings of the running process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wall_s() -> float:
    """Return seconds of a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def cpu_s() -> float:
    """Return processor seconds of this process, of all its threads and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_nbytes() -> int:
    """Return the most memory that was ever resident in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def private_nbytes() -> dict[str, int]:
    """Return bytes of memory that no other process shares.

    `private` is all of it, `anonymous` the part that has no file behind it: the rest are pages of mapped files that
    this process alone has touched, and the system may drop them.

    Raises:
        OSError: the system has no `/proc/self/smaps_rollup`.
    """
    fields: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, amount, _ = line.split(maxsplit=2)
        fields[name.rstrip(":")] = int(amount) * 1024
    return {"private": fields["Private_Clean"] + fields["Private_Dirty"], "anonymous": fields["Anonymous"]}


def allocated_nbytes(action: Callable[[], Any]) -> int:
    """Return the most bytes that torch has allocated at a time during an action, beside those from before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


class Stages:
    """Stages of a preparation, one after the other.

    Attributes:
        wall_s: seconds, by stage; a stage that began several times has one entry.
        cpu_s: processor seconds, by stage.
        peak_nbytes: the most memory that was resident until the end of each stage.
    """

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self.peak_nbytes: dict[str, int] = {}
        self._current: tuple[str, float, float] | None = None

    def begin(self, name: str) -> None:
        """Begin a stage, and end the one before it."""
        self.end()
        self._current = name, wall_s(), cpu_s()

    def end(self) -> None:
        """End the current stage, if there is one."""
        if self._current is None:
            return
        name, wall, cpu = self._current
        self.wall_s[name] = self.wall_s.get(name, 0.0) + wall_s() - wall
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + cpu_s() - cpu
        self.peak_nbytes[name] = peak_nbytes()
        self._current = None
