"""Memory and processor time of a server: its process and all that it has started."""

from __future__ import annotations

import os
import time
from pathlib import Path


def tree(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        children = Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text()
        left += map(int, children.split())
    return found


def memory_nbytes(pid: int) -> int:
    """Return the memory of a server: pages that its processes share count once."""
    total = 0
    for each in tree(pid):
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def rest_s(pid: int, seconds: float) -> float:
    """Return the processor seconds that a server takes per second in which nobody asks."""
    before = _cpu_s(pid)
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / seconds


def _cpu_s(pid: int) -> float:
    total = 0
    for each in tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
