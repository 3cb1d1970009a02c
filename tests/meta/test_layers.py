"""The rules of the linter against imports are live."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BANNED = ("aotexport", "torch._dynamo", "torch._functorch", "torch._inductor", "torch.export", "sympy", "triton")


@pytest.mark.parametrize(
    ("file", "banned"),
    [
        ("runtimes/python/aotexport_runtime/call/probe.py", BANNED),
        ("aotexport/probe.py", ["torch._dynamo", "torch._functorch", "torch._inductor"]),
        ("aotexport/torch_internals/probe.py", []),
    ],
)
def test_import_of_a_banned_module_is_reported(file, banned):
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=json", "--select=TID251"]
    done = subprocess.run(
        [*command, "--stdin-filename", file, "-"],
        input="".join(f"import {module}\n" for module in BANNED),
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    reported = [each["message"].partition(" is banned")[0].strip("`") for each in json.loads(done.stdout)]
    assert [module for module in BANNED if module in reported] == [module for module in BANNED if module in banned]
