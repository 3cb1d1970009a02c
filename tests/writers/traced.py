"""`python -m tests.writers.traced BASE PLACE STEP`: save with faults at system calls of every kind, by strace.

At each STEP-th call of a save, one save is killed, and for another the call fails with EIO. What `faults.c` does not
see is here: reads, descriptors, locks, memory. A line of JSON per save, as in `tests.writers.faults`.
"""

import collections
import errno
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import aotexport_runtime
from tests.writers.faults import KILL, Faults, Save

_END = "/end-of-the-save"
_CALL = re.compile(r"\d+\s+(\w+)\((.*)")
_INJECTED = {KILL: "signal=KILL", errno.EIO: "error=EIO"}


class TracedFaults(Faults):
    """Saves in forks that strace is attached to."""

    def traced(self, name: str = "", number: int = 0, fault: int = KILL) -> Save:
        """Save with a fault at the call `number` of one name, from 1; without a name: at none."""
        parent, log, ended = self.parent(), self.place / "trace", self.place / "ended"
        ended.unlink(missing_ok=True)
        waits, goes = os.pipe()
        child = os.fork()
        if not child:
            os.read(waits, 1)
            self._save_and_tell(parent / "bundle", ended)
        command = ["strace", "-f", "-qq", "-o", str(log), "-p", str(child)]
        command += [f"--inject={name}:{_INJECTED[fault]}:when={number}"] if name else []
        tracer = subprocess.Popen(command)
        while "TracerPid:\t0" in Path(f"/proc/{child}/status").read_text():
            time.sleep(0.005)
        os.write(goes, b" ")
        for descriptor in (waits, goes):
            os.close(descriptor)
        status = os.waitpid(child, 0)[1]
        tracer.wait()
        how = "killed" if os.WIFSIGNALED(status) else (ended.read_text() if ended.exists() else "")
        calls = [list(match.groups()) for match in map(_CALL.match, log.read_text().splitlines()) if match]
        end = next((at for at, (_, rest) in enumerate(calls) if _END in rest), len(calls))
        return Save(number, fault, how, *self.after(parent), calls[:end])

    def _save_and_tell(self, path: Path, ended: Path) -> None:
        try:
            try:
                aotexport_runtime.save(self.module, path, force=True)
                how = "done"
            except BaseException as error:
                how = type(error).__name__
            os.access(_END, os.F_OK)
            ended.write_text(how)
        finally:
            os._exit(0)


def saves(base: Path, place: Path, step: int) -> Iterator[Save]:
    """Yield a save without a fault, and two with one at each `step`-th call, in a drawn order."""
    writer = TracedFaults(base, place)
    whole = writer.traced()
    yield whole
    seen = collections.Counter[str]()
    calls: list[tuple[str, int]] = []
    for name, _ in whole.calls:
        seen[name] += 1
        calls.append((name, seen[name]))
    random.Random(0).shuffle(calls)
    for name, number in calls[::step]:
        for fault in _INJECTED:
            yield writer.traced(name, number, fault)


if __name__ == "__main__":
    base, place, step = sys.argv[1:]
    for save in saves(Path(base), Path(place), int(step)):
        print(json.dumps(asdict(save)), flush=True)
