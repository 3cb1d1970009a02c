"""`python -m tests.writers.faults BASE PLACE STEP FAULT...`: save with faults at calls that change files.

Each STEP-th call fails, by the faults in turn; each save runs in a fork, with `faults.c` before the C library. A line
of JSON per save tells how it ended, and what stands at its path afterwards.
"""

import ctypes
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aotexport_runtime

KILL, SHORT = 0, -1
"""Faults beside the system's error numbers: the process is killed, a write takes half of its bytes."""


@dataclass(frozen=True)
class Save:
    """How a save with a fault ended.

    Attributes:
        call: number of the call at which it failed.
        fault: an error number, `KILL` or `SHORT`.
        ended: `done`, `killed`, or the class of the error.
        found: `old`, `new`, or the error of opening what is at the path.
        left: other entries beside the path.
        calls: the calls that change files, as far as they came: name and paths.
    """

    call: int
    fault: int
    ended: str
    found: str
    left: list[str]
    calls: list[list[str]]


class Faults:
    """Saves of a module over copies of a bundle."""

    def __init__(self, base: Path, place: Path) -> None:
        self.base, self.place = base, place
        self.module = aotexport_runtime.load(base)
        for parameter in self.module.parameters():
            parameter.data.fill_(0.5)
        aotexport_runtime.save(self.module, place / "changed")
        self.states = {self.weights(base): "old", self.weights(place / "changed"): "new"}

    def weights(self, path: Path) -> tuple[str, ...]:
        """Return the digests of a bundle's weights, after all digests were compared."""
        files = aotexport_runtime.open_bundle(path).manifest.files
        return tuple(entry.sha256 for entry in files if entry.path.startswith("weights"))

    def save(self, call: int, fault: int) -> Save:
        """Save in a fork with a fault at a call; -1: at none."""
        parent = self.parent()
        log = self.place / "calls"
        child = os.fork()
        if not child:
            self._save_as_child(parent / "bundle", log, call, fault)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        calls = [line.split("\t") for line in log.read_text().splitlines()]
        ended = calls.pop()[0] if code >= 0 else "killed"
        return Save(call, fault, ended, *self.after(parent), calls)

    def parent(self) -> Path:
        """Return a directory with a copy of the base and nothing else."""
        parent = self.place / "parent"
        shutil.rmtree(parent, ignore_errors=True)
        shutil.copytree(self.base, parent / "bundle")
        return parent

    def after(self, parent: Path) -> tuple[str, list[str]]:
        """Return what is at the path after a save, and what is beside it."""
        try:
            found = self.states[self.weights(parent / "bundle")]
        except Exception as error:
            found = repr(error)
        return found, sorted(path.name for path in parent.iterdir() if path.name != "bundle")

    def _save_as_child(self, path: Path, log: Path, call: int, fault: int) -> None:
        library = ctypes.CDLL(None)
        names = ("fault_at", "fault_number", "fault_log")
        settings: dict[str, Any] = {name: ctypes.c_int.in_dll(library, name) for name in names}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        settings["fault_number"].value = fault
        settings["fault_log"].value = descriptor
        settings["fault_at"].value = call
        try:
            aotexport_runtime.save(self.module, path, force=True)
            ended = "done"
        except BaseException as error:
            ended = type(error).__name__
            if not isinstance(error, aotexport_runtime.NotWritten):
                traceback.print_exc()
        settings["fault_at"].value = -1
        settings["fault_log"].value = -1
        os.write(descriptor, f"{ended}\n".encode())
        os._exit(0)


def saves(base: Path, place: Path, step: int, faults: Sequence[int]) -> Iterator[Save]:
    """Yield a save without a fault, and one with a fault at each `step`-th call."""
    writer = Faults(base, place)
    whole = writer.save(-1, KILL)
    yield whole
    for turn, call in enumerate(range(0, len(whole.calls), step)):
        yield writer.save(call, faults[turn % len(faults)])


if __name__ == "__main__":
    base, place, step, *faults = sys.argv[1:]
    for save in saves(Path(base), Path(place), int(step), [int(fault) for fault in faults]):
        print(json.dumps(asdict(save)), flush=True)
