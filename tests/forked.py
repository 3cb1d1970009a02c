"""Processes forked from one that has imported torch: importing it takes ten times the rest.

Verifications run in forks of a process with the runtime alone, scripts in forks of one with the exporter. Both have
done once what they fork for: the first export of a process takes five times the second.
"""

from __future__ import annotations

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
import gc, multiprocessing, os, traceback

# Semaphores of other methods outlive a process that ends by `os._exit`, and Python 3.14 warns of them.
multiprocessing.set_start_method("fork", force=True)

def enter(directory, environment, output, errors):
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)

gc.collect()
gc.freeze()
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
            os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


_GOLDEN = Path(__file__).parent / "golden" / "v1.1" / "view_of_returned_view" / "bundle"
_VERIFIED = f"""
import contextlib, io

with contextlib.redirect_stdout(io.StringIO()):
    assert main(["selftest", {str(_GOLDEN)!r}]) == 0
"""

_SCRIPTS = """
import json, os, runpy, sys, tempfile, warnings
import torch, transformers, transformers.modeling_utils
import aotexport, aotexport.pipeline.export, aotexport_runtime

# A build of torch for CUDA takes no backward pass in a fork after one in its parent.
if torch.version.cuda is None:
    with tempfile.TemporaryDirectory() as folder:
        aotexport.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),), output=folder + "/bundle", verify=False)

def run(arguments, text):
    sys.argv = arguments
    if text is None:
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        warnings.simplefilter("error")
        sys.path.insert(0, "")
        exec(compile(text, "<string>", "exec"), vars(sys.modules["__main__"]))
"""

_INTERPRETER = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
from aotexport.verify.interpret.__main__ import main

def run(arguments):
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = arguments
    main()
"""

_parents: dict[str, subprocess.Popen[str]] = {}


def _parent(ready: str) -> subprocess.Popen[str]:
    """Return the process to fork, which runs `ready` when it begins: imports, and a function `run`."""
    if ready not in _parents:
        command = [sys.executable, "-P", "-c", ready + _FORK]
        _parents[ready] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    return _parents[ready]


def _run(ready: str, place: dict[str, Any], request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    parent = _parent(ready)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        place = {**place, "output": str(output), "errors": str(errors)}
        print(json.dumps([place, request]), file=parent.stdin, flush=True)
        code = int(parent.stdout.readline())
        return subprocess.CompletedProcess([], code, output.read_text(), errors.read_text())


def run_script(
    path: Path | None, *arguments: str, cwd: Path, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `text` with warnings as errors, in a process that has imported the exporter."""
    place = {"directory": str(cwd), "environment": dict(os.environ)}
    return _run(_SCRIPTS, place, {"arguments": [str(path or "-c"), *arguments], "text": text})


def interpret(command: Sequence[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -P -m aotexport.verify.interpret ...` as `subprocess.run` does."""
    return _run(_INTERPRETER, {"directory": os.getcwd(), "environment": env}, {"arguments": command[4:]})


def end() -> None:
    """End the processes that are forked."""
    while _parents:
        _parents.popitem()[1].communicate()


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
        return _run(
            READY + _VERIFIED, self._place, {"path": path, "environment": dict(os.environ), "arguments": arguments}
        )
