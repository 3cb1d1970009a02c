"""A slice of the fuzzing of operators, its table, and the memory in which errors show."""

import signal
import subprocess
import sys

import pytest
import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.execution.preconditions.table import PRECONDITIONS
from tests.fuzz import table
from tests.fuzz.guarded import GUARD
from tests.fuzz.operators import FROM_TYPES_ALONE, fuzz, read
from tests.preload import preloaded

ERRORS = [
    ("ctypes.string_at(tensor.data_ptr(), 65)", signal.SIGSEGV),
    ("ctypes.memset(tensor.data_ptr() + 12, 0, 1); del tensor", signal.SIGABRT),
    ("ctypes.memset(tensor.data_ptr() - 1, 0, 1); del tensor", signal.SIGABRT),
    ("place = tensor.data_ptr(); del tensor; ctypes.string_at(place, 1)", signal.SIGSEGV),
]


FORKS = """
import ctypes, os, torch
for error in {errors!r}:
    child = os.fork()
    if not child:
        tensor = torch.empty(12, dtype=torch.uint8)
        exec(error)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_errors_of_memory_end_guarded_processes() -> None:
    script = FORKS.format(errors=["pass", *(error for error, _ in ERRORS)])
    with preloaded(GUARD) as environment:
        done = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert list(map(int, done.stdout.split())) == [0, *(-number for _, number in ERRORS)]


@pytest.mark.parametrize(
    ("first", "calls", "least"),
    [pytest.param(0, 15, 25, marks=pytest.mark.slow, id="types"), pytest.param(FROM_TYPES_ALONE, 8, 50, id="valid")],
)
def test_operators_called_with_hostile_arguments_stay_within_their_memory(first: int, calls: int, least: int) -> None:
    names = sorted(allowed_aten_operators())
    checked = [name for name in names if name in PRECONDITIONS or name.partition(".")[0] in PRECONDITIONS]
    rows = list(fuzz(dict.fromkeys((*checked[::12], *names[::200])), first + calls, first))
    assert [row for row in rows if row.outcome != "ok"] == []
    assert len(rows) > 20
    assert sum(row.accepted for row in rows) > least


def test_table_has_operators_of_the_list_alone_and_no_error() -> None:
    rows = read()
    assert rows.keys() <= allowed_aten_operators()
    assert [row for row in rows.values() if row.outcome != "ok"] == []


def test_every_operator_of_the_list_was_fuzzed() -> None:
    # A list that has grown needs `python -m tests.fuzz.operators` for what is new.
    assert len(allowed_aten_operators() - read().keys()) <= len(allowed_aten_operators()) // 100


_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13")


@_2_13
def test_operators_of_which_no_call_was_taken_are_those_without_a_kernel() -> None:
    alone = {name for name in allowed_aten_operators() if table.is_of_devices(name)}
    assert {row.operator for row in read().values() if not row.accepted} == alone
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: TID251 (there is no public way to ask)
    for name in alone:
        base, _, overload = name.partition(".")
        # The form with `out` calls the one without.
        full = f"aten::{base}" + {"default": "", "out": ""}.get(overload, f".{overload.removesuffix('_out')}")
        assert not has_kernel(full, "CPU"), name


@_2_13
def test_table_of_bounds_is_fresh() -> None:
    assert table.TABLE.read_text() == table.text()
