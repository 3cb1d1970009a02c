"""Fresh processes forked from one that has imported the runtime alone: importing torch takes ten times the rest."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aotexport.verify.fresh import READY

_FORK = """
import os, traceback

def enter(directory, environment, output, errors):
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)

for line in sys.stdin:
    process = os.fork()
    if not process:
        code = 1
        try:
            place, request = json.loads(line)
            enter(**place)
            code = run(**request)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", READY + _FORK]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def end() -> None:
    """End the process that is forked, if there is one."""
    if _parent.cache_info().currsize:
        _parent().communicate()
        _parent.cache_clear()


class ForkedProcess:
    """Does what `aotexport.verify.fresh.FreshProcess` does."""

    def __init__(self) -> None:
        self._place = {"directory": os.getcwd(), "environment": dict(os.environ)}

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def run(
        self, arguments: Sequence[str], timeout_s: float, path: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            place = {**self._place, "output": str(output), "errors": str(errors)}
            print(json.dumps([place, {"path": path, "arguments": arguments}]), file=parent.stdin, flush=True)
            code = int(parent.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())
