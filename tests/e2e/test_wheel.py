"""The wheels: what they weigh, hold and ask for, and that they are the same bytes wherever they are built."""

import re
import shutil
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import aotexport
import aotexport_runtime
from tests.e2e.processes import ROOT, run

PROJECTS = {"aotexport": ROOT, "aotexport_runtime": ROOT / "runtimes" / "python"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, by the name of its package."""
    return {name: build(project, tmp_path_factory.mktemp(name), "wheel") for name, project in PROJECTS.items()}


def build(project: Path, into: Path, target: str) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", into, cwd=project)
    (archive,) = into.iterdir()
    return archive


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.parametrize("name", PROJECTS)
def test_wheel_is_pure_small_and_holds_every_file_of_its_package(wheels: dict[str, Path], name: str) -> None:
    assert wheels[name].name.endswith("-py3-none-any.whl")
    assert wheels[name].stat().st_size < 750_000
    files = [p for p in (PROJECTS[name] / name).rglob("*") if p.is_file() and p.suffix != ".pyc"]
    with zipfile.ZipFile(wheels[name]) as archive:
        held = {entry for entry in archive.namelist() if ".dist-info/" not in entry}
    assert held == {p.relative_to(PROJECTS[name]).as_posix() for p in files}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_archives_of_a_copy_built_later_are_the_same_bytes(target: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(PROJECTS["aotexport_runtime"], copy, ignore=left_out, copy_function=shutil.copyfile)
    shutil.copyfile(ROOT / ".gitignore", copy / ".gitignore")
    first = build(PROJECTS["aotexport_runtime"], tmp_path / "first", target)
    second = build(copy, tmp_path / "second", target)
    assert first.read_bytes() == second.read_bytes()


def test_distributions_have_one_version(wheels: dict[str, Path]) -> None:
    exporter = metadata_of(wheels["aotexport"])
    ours = {line for line in exporter.get_all("Requires-Dist", []) if line.startswith("aotexport-runtime")}
    versions = {re.search(r"==([^; ]+)", line)[1] for line in ours}
    versions |= {metadata_of(wheel)["Version"] for wheel in wheels.values()}
    assert versions == {aotexport.__version__} == {aotexport_runtime.__version__}


def test_runtime_wheel_requires_torch_only_as_an_extra(wheels: dict[str, Path]) -> None:
    metadata = metadata_of(wheels["aotexport_runtime"])
    requirements = metadata.get_all("Requires-Dist", [])
    required = {re.split(r"[^\w-]", line)[0] for line in requirements if "extra ==" not in line}
    assert required == {"click", "safetensors", "msgspec", "numpy"}
    assert [line for line in requirements if line.startswith("torch")] == ["torch>=2.7; extra == 'torch'"]
    assert metadata["License-Expression"] == "Apache-2.0"
