"""Where torch is not installed: what works, and what the rest says."""

import subprocess
import sys
from pathlib import Path

import pytest

# An import of torch fails, and torch is not found: as in a container that was made without it.
WITHOUT = """
import sys, runpy
sys.modules["torch"] = None
"""
INSTALL = "needs torch, which is not installed here. Install it by `pip install 'torch>=2.7'`"


def run(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("call", "subject"),
    [
        ("import aotexport_runtime as r; r.load('bundle')", "target `auto`"),
        ("import aotexport_runtime as r; r.load('bundle', target='portable')", "target `portable`"),
        ("from aotexport_runtime import save", "`aotexport_runtime.save`"),
        ("import aotexport_runtime as r; r.selftest('bundle')", "`aotexport_runtime.selftest`"),
    ],
)
def test_call_that_needs_torch_says_so(call: str, subject: str, here: Path) -> None:
    process = run(call, cwd=here)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == f"aotexport_runtime.errors.TorchMissing: {subject} {INSTALL}"


def test_inspect_needs_no_torch(here: Path) -> None:
    process = run("runpy.run_module('aotexport_runtime', run_name='__main__')", "inspect", "bundle", cwd=here)
    assert (process.returncode, process.stderr) == (0, "")
