"""A slice of the fuzzing of operators, its table, and the memory in which errors show."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.engines.preconditions.table import PRECONDITIONS
from tests.fuzz.operators import GUARD, fuzz, read
from tests.preload import preloaded

ERRORS = [
    ("ctypes.string_at(tensor.data_ptr(), 65)", signal.SIGSEGV),
    ("ctypes.memset(tensor.data_ptr() + 12, 0, 1); del tensor", signal.SIGABRT),
    ("ctypes.memset(tensor.data_ptr() - 1, 0, 1); del tensor", signal.SIGABRT),
    ("place = tensor.data_ptr(); del tensor; ctypes.string_at(place, 1)", signal.SIGSEGV),
]


@pytest.mark.parametrize(("error", "number"), ERRORS, ids=["read", "write", "write_before", "use_after_free"])
def test_error_of_memory_ends_a_guarded_process(error: str, number: signal.Signals) -> None:
    script = f"import ctypes, torch\ntensor = torch.empty(12, dtype=torch.uint8)\nprint('made')\n{error}"
    with preloaded(GUARD) as environment:
        done = subprocess.run([sys.executable, "-u", "-c", script], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("made\n", -number)


def test_operators_called_with_hostile_arguments_stay_within_their_memory() -> None:
    names = sorted(allowed_aten_operators())
    checked = [name for name in names if name in PRECONDITIONS or name.partition(".")[0] in PRECONDITIONS]
    rows = list(fuzz(dict.fromkeys((*checked[::3], *names[::50])), 15))
    assert [row for row in rows if row.outcome != "ok"] == []
    assert len(rows) > 80
    assert sum(row.accepted for row in rows) > 100


def test_table_has_operators_of_the_list_alone_and_no_error() -> None:
    rows = read()
    assert rows.keys() <= allowed_aten_operators()
    assert [row for row in rows.values() if row.outcome != "ok"] == []
