"""The import rules of the linter are live: every banned module is reported, with the reason to show."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = tomllib.loads((ROOT / "runtimes/python/ruff.toml").read_text())["lint"]["flake8-tidy-imports"]["banned-api"]
EXPORTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["flake8-tidy-imports"][
    "banned-api"
]

LAYERS = {
    "runtime": ("runtimes/python/aotexport_runtime/probe.py", RUNTIME),
    "runtime's call chain": ("runtimes/python/aotexport_runtime/call/probe.py", RUNTIME),
    "exporter": ("aotexport/probe.py", EXPORTER),
}


def reported(file: str, source: str) -> list[str]:
    """Return the messages of the rule against banned modules for `source`, were it in `file`."""
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=json", "--select=TID251"]
    process = subprocess.run(
        [*command, "--stdin-filename", file, "-"], input=source, capture_output=True, text=True, check=False, cwd=ROOT
    )
    return [diagnostic["message"] for diagnostic in json.loads(process.stdout)]


@pytest.mark.parametrize(("file", "banned"), LAYERS.values(), ids=LAYERS)
def test_import_of_a_banned_module_is_reported_with_its_reason(file, banned):
    source = "".join(f"import {module}\n" for module in banned)
    assert reported(file, source) == [f"`{module}` is banned: {rule['msg']}" for module, rule in banned.items()]


def test_runtime_may_import_neither_the_exporter_nor_torchs_compilers_nor_model_code():
    assert set(RUNTIME) >= {
        *("aotexport", "torch._dynamo", "torch._functorch", "torch._inductor", "torch.export"),
        *("sympy", "transformers", "triton"),
    }


def test_private_names_of_torch_have_one_package():
    source = "".join(f"import {module}\n" for module in EXPORTER)
    assert reported("aotexport/torch_internals/patches.py", source) == []
