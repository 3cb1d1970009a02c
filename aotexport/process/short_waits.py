"""Let threads of torch wait without spinning, in a process whose OpenMP was loaded long ago.

Between two operators, threads of GNU's OpenMP spin for some milliseconds. On a busy machine they take the processor
from the thread that they wait for: eager calls then take ten times their time. `OMP_WAIT_POLICY` is read once, when
torch is loaded; a caller's process is beyond that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import torch

_MOST_POOLS = 4
_NUMBERS_PER_THREAD = 1 << 16
"""Numbers of an operator for each thread that is to take part in it; torch gives each at least 32,768."""


@contextlib.contextmanager
def waits_short() -> Iterator[None]:
    """Let threads of torch spin shortly in this block: 100 rounds, not 300,000.

    GNU's OpenMP does so while it has more threads than processors. Pools of further threads, which rest, bring that
    about. Operators run on as many threads as before, with the results of before. Where processors are left over, and
    where OpenMP is another one, nothing is done.

    Source: libgomp of GCC 13, `gomp_team_start` and `gomp_throttled_spin_count_var`.
    """
    begun = [threading.Event() for _ in range(_pools())]
    done = threading.Event()
    threads = [threading.Thread(target=_rest, args=(each, done), daemon=True) for each in begun]
    try:
        for thread, each in zip(threads, begun, strict=True):
            thread.start()
            each.wait()
        yield
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _pools() -> int:
    """Return how many further pools make more threads than processors; 0: threads do not share processors."""
    if sys.platform != "linux" or torch.get_num_threads() == 1:
        return 0
    left = len(os.sched_getaffinity(0)) - torch.get_num_threads()
    pools = max(0, left) // (torch.get_num_threads() - 1) + 1
    return pools if pools <= _MOST_POOLS else 0


def _rest(begun: threading.Event, done: threading.Event) -> None:
    """Start this thread's pool by an operator that needs all of it, and keep it until `done`."""
    try:
        torch.zeros(torch.get_num_threads() * _NUMBERS_PER_THREAD, dtype=torch.uint8).add_(1)
    finally:
        begun.set()
    done.wait()
