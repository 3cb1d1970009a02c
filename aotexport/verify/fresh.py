"""A process with only the runtime, started early in an export: importing torch takes time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from aotexport.errors import VerificationFailed

READY = """
import json, os, sys
import torch
import aotexport_runtime.commands.self_test
from aotexport_runtime.cli.app import main

torch.ones((), requires_grad=True).backward(torch.ones(()))  # imports what torch imports then

def run(path, environment, arguments):
    sys.path[:] = path or sys.path
    os.environ.update(environment)
    return main(arguments)
"""

_WAIT = """
request = sys.stdin.readline()
sys.exit(run(**json.loads(request)) if request else 0)
"""


class FreshProcess:
    """Runs one command of `python -m aotexport_runtime`; ends with the block."""

    def __init__(self) -> None:
        # Without `-P`, a file `inspect.py` in the working directory would replace Python's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", READY + _WAIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Threads that wait do not spin: the export still needs the processors.
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def run(
        self, arguments: Sequence[str], timeout_s: float, path: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run the command and wait at most `timeout_s`; `path` is the search path for modules, empty: the default."""
        # Model files set variables that the modules of their operators read.
        request = json.dumps({"path": list(path), "environment": dict(os.environ), "arguments": list(arguments)})
        output, errors = self._process.communicate(request + "\n", timeout=timeout_s)
        return subprocess.CompletedProcess(self._process.args, self._process.returncode, output, errors)


def printed(done: subprocess.CompletedProcess[str], kind: type[Any], name: str) -> Any:
    """Return what a process printed as JSON in its last line; `VerificationFailed` by the name of one that did not."""
    try:
        return msgspec.convert(json.loads(done.stdout.splitlines()[-1]), kind)
    except (IndexError, ValueError):
        tail = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"
        raise VerificationFailed(f"the {name} failed:\n{tail}", [tail]) from None
