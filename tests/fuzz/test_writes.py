"""Which operators change what they take: those whose schema says so, and those of a table that do not."""

import json
import subprocess
import sys

import pytest

from aotexport_runtime.execution import ops
from tests.fuzz.table import is_of_devices

WRITES_UNSEEN = {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm"}
"""Operators, by base name, that write into an argument and do not say so in their schema."""

WITHOUT_VERSION = {
    *("batch_norm", "native_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit"),
    *("rrelu_with_noise", "rrelu_with_noise_", "set_data"),
}
"""Operators, by base name, after which the version of a tensor does not tell that it has other values."""


@pytest.mark.slow
def test_operators_that_change_what_they_take_say_so_or_are_in_the_table():
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.writes"]
    # Libraries print, too.
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    silent = {name for name, seen in found.items() if seen and not _is_mutable(name)}
    assert {name.partition(".")[0] for name in silent} == {base for base in WRITES_UNSEEN if not is_of_devices(base)}
    unseen = {name.partition(".")[0] for name, seen in found.items() if "bytes unseen" in seen}
    assert unseen == WITHOUT_VERSION
    # Autograd keeps tensors with their versions: sizes never change without.
    assert {name for name, seen in found.items() if "sizes unseen" in seen} == set()
    assert len([name for name, seen in found.items() if seen]) > 900


def _is_mutable(operator: str) -> bool:
    return ops.overload(f"aten::{operator}", None, frozenset())._schema.is_mutable
