"""The runtime's wheel: what it weighs, holds and asks for."""

from __future__ import annotations

import re
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from examples.runtime_venv import RUNTIME, build_wheel
from tests.e2e.processes import run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_runtime_wheel_is_pure_and_small(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 650_000


def test_runtime_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = RUNTIME / "aotexport_runtime"
    sources = {p.relative_to(RUNTIME).as_posix() for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not re.match(r"[^/]*\.dist-info/", name)}
    assert held == sources


def test_runtime_wheel_requires_torch_only_as_an_extra(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist", [])
    required = {re.split(r"[^\w-]", line)[0] for line in requirements if "extra ==" not in line}
    assert required == {"safetensors", "msgspec", "numpy"}
    assert [line for line in requirements if line.startswith("torch")] == ['torch>=2.7; extra == "torch"']
    assert metadata["License-Expression"] == "Apache-2.0"


def test_runtime_venv_cannot_import_the_exporter(runtime_python: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u, aotexport_runtime; print(u.find_spec('aotexport'), aotexport_runtime.__file__)"
    found, where = run(runtime_python, "-I", "-c", code, cwd=tmp_path).split()
    assert found == "None"
    assert Path(where).is_relative_to(runtime_python.parents[1])
