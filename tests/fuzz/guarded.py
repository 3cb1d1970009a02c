"""Hostile calls of operators, each operator in a process of its own, in memory that ends where it may not be touched.

New memory is filled with one byte in the first run of a call and with another in the second (`guard.c`): results that
differ have bytes that nobody has written.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators
from tests.fuzz.valid_calls import valid_calls
from tests.preload import preloaded

GUARD = Path(__file__).parent / "guard.c"
_CASE_S = 60
_MOST_NBYTES = 8 << 30
Row = TypeVar("Row")


class Note(Protocol):
    """Notes how far the calls of an operator have come: the number of the next one, facts, the outcome so far."""

    def __call__(self, call: int, facts: Any, outcome: str) -> None: ...


def rows_of(
    module: str, row: Callable[..., Row], operators: Iterable[str], calls: int, first: int = 0
) -> Iterator[Row]:
    """Run `python -m module --guarded` in guarded memory, for the calls `first` to `calls`; yield a `row` per operator.

    Raises:
        RuntimeError: the process failed itself.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, "--guarded", str(first), str(calls), *operators]
    with (
        preloaded(GUARD) as environment,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            yield row(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"the guarded process ended with {process.returncode}")


def run_guarded(
    first: int, calls: int, operators: Iterable[str], facts: str, call_often: Callable[[str, range, Note], None]
) -> None:
    """Print a row per operator; memory is guarded in this process.

    Args:
        first: number of the first call.
        calls: number after that of the last.
        operators: `base.overload` each.
        facts: name of the field of a row that facts are in.
        call_often: makes the calls of one operator.
    """
    torch.set_num_threads(1)
    # What children would each read and import anew.
    allowed_aten_operators()
    valid_calls()
    call_often("relu.default", range(40), lambda *_: None)
    _limit_time(0)
    # A collection of a child would go through all that is here, and copy its pages.
    gc.collect()
    gc.freeze()
    for operator in operators:
        with tempfile.TemporaryFile() as progress:
            child = os.fork()
            if not child:
                _end_as_child(operator, range(first, calls), progress.fileno(), call_often)
            status = os.waitpid(child, 0)[1]
            call, found, outcome = json.loads((progress.seek(0), progress.read())[1])
        if os.WIFSIGNALED(status):
            outcome = f"call {call}: {signal.Signals(os.WTERMSIG(status)).name}"
        print(json.dumps({"operator": operator, "calls": call, facts: found, "outcome": outcome}), flush=True)


def _end_as_child(operator: str, calls: range, progress: int, call_often: Callable[[str, range, Note], None]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_NBYTES, _MOST_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)

    def note(call: int, facts: Any, outcome: str) -> None:
        os.pwrite(progress, json.dumps([call, facts, outcome]).ljust(200).encode(), 0)

    try:
        call_often(operator, calls, note)
    finally:
        os._exit(0)


def seen_twice(draw: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return what two runs of one call give, with other bytes in new memory; a call that takes too long is killed.

    One that is refused, which gives something false, is made once.

    Args:
        draw: makes the arguments; their memory is not guarded.
        run: makes the call with them, and returns what it saw.
    """
    fill, on = (ctypes.c_ubyte.in_dll(ctypes.CDLL(None), f"guard_{name}") for name in ("fill", "on"))
    _limit_time(_CASE_S)
    on.value = 0
    drawn = draw()
    on.value = 1
    fill.value = 0x5A
    first = run(*drawn)
    fill.value = 0xA5
    return first, run(*drawn) if first else first


def _limit_time(seconds: int) -> None:
    """End this process after some of the processor's time, and, if it waits, of ours; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
