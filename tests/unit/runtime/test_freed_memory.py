"""Memory that calls free, which the next call uses again."""

import os
import subprocess
import sys

import pytest

_SECOND_ROUND = """
import resource
import numpy
from aotexport_runtime.execution.allocator import keep_freed_memory

keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [numpy.ones(24 << 17) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
"""Prints how many pages of 96 MiB, written and freed before, the system has to give again."""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("chosen", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory_is_used_again_unless_the_user_asks_otherwise(chosen, is_kept):
    command = [sys.executable, "-c", _SECOND_ROUND]
    done = subprocess.run(command, env={**os.environ, **chosen}, capture_output=True, text=True, check=True)

    assert (int(done.stdout) < 200) is is_kept
