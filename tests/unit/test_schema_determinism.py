"""Exporting the same model twice gives the same bundle, byte by byte, wherever and by whatever hash seed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_script

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests/golden/cases.py"
CHOSEN = ("custom_autograd_function", "dynamic_sizes", "nested_inputs", "rebound_buffer")
SCRIPT = f"""
import sys

import torch
import aotexport

sys.path.append({str(ROOT)!r})
from cases import CASES

for name in {CHOSEN!r}:
    torch.manual_seed(0)
    case = CASES[name]()
    options = dict(programs=case.programs, dynamic_shapes=case.dynamic_shapes)
    aotexport.export(case.model, case.args, case.kwargs, output="out/" + name, verify=False, **options)
"""


def prepare(directory: Path) -> Path:
    """Make a directory with a script that exports the chosen cases there; return the script."""
    directory.mkdir(parents=True)
    shutil.copy(CASES, directory / "cases.py")
    (directory / "script.py").write_text(SCRIPT)
    return directory / "script.py"


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every exported file by its path."""
    paths = [path for path in (directory / "out").rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Return the files of two exports: of a fork, and of a process with a hash seed that the fork does not have."""
    root = tmp_path_factory.mktemp("determinism")
    here, elsewhere = root / "here", root / "some/where/else"
    done = run_script(prepare(here), cwd=here)
    assert done.returncode == 0, done.stderr
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, prepare(elsewhere)], cwd=elsewhere, env=environment, check=True)
    return [files_of(directory) for directory in (here, elsewhere)]


def test_export_under_another_hash_seed_in_another_directory_gives_the_same_files(twice):
    first, second = twice
    assert {path.split("/")[1] for path in first} == set(CHOSEN)
    assert sorted(first) == sorted(second)
    assert [path for path in first if first[path] != second[path]] == []


def test_export_writes_nothing_of_its_directory(twice, tmp_path_factory):
    trace = str(tmp_path_factory.getbasetemp()).encode()
    assert [path for path, data in twice[0].items() if trace in data] == []
