"""Threads of torch that wait without spinning: further pools of threads, in a process with several of torch's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from aotexport.process.blocks import waits_short

COUNTED = """
import os, torch
from aotexport.process.blocks import waits_short

def threads():
    return len(os.listdir("/proc/self/task"))

torch.zeros(1 << 20).add_(1)
before = threads()
with waits_short():
    assert threads() > len(os.sched_getaffinity(0)), threads()
    assert threads() > before
# A pool ends with its thread, a moment after Python has joined that.
while threads() > before:
    os.sched_yield()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pools of GNU's OpenMP")
def test_process_has_more_threads_than_processors_in_the_block_alone():
    threads = str(max(2, len(os.sched_getaffinity(0))))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    subprocess.run([sys.executable, "-c", COUNTED], check=True, env=environment, timeout=100)


def test_one_thread_gets_no_pools(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = threading.active_count()
    with waits_short():
        assert threading.active_count() == before


def test_few_threads_of_many_processors_get_no_pools(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    before = threading.active_count()
    with waits_short():
        assert threading.active_count() == before


def test_pools_end_with_an_error_in_the_block(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(2), raising=False)
    before = threading.active_count()
    with pytest.raises(KeyError), waits_short():
        raise KeyError
    assert threading.active_count() == before
