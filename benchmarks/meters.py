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
