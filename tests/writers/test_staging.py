"""The temporary directory of an export beside its output: gone after an export, and after the next if one is killed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aotexport_runtime.bundle.staging import staged
from aotexport_runtime.errors import OutputExists

STAGING = """
import sys
from pathlib import Path
from aotexport_runtime.bundle.staging import staged
from aotexport_runtime.errors import OutputExists

with staged(Path("bundle"), force=False) as stage:
    (stage / "half").write_text("written")
    print(stage.name, flush=True)
    sys.stdin.read()
"""


def begun(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Return a process that is writing a bundle, and its temporary directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAGING], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, directory / process.stdout.readline().strip()


def test_directory_of_a_killed_export_is_removed_by_the_next_one(tmp_path: Path) -> None:
    process, left = begun(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (left / "half").exists()
    with staged(tmp_path / "bundle", force=False):
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_directory_of_an_export_that_goes_on_stays(tmp_path: Path) -> None:
    process, other = begun(tmp_path)
    try:
        with staged(tmp_path / "bundle", force=False):
            assert (other / "half").exists()
    finally:
        process.kill()
        process.communicate()


def test_directories_with_names_like_a_bundles_stay(tmp_path: Path) -> None:
    others = [tmp_path / name for name in (".bundle.old.abc", ".bundle.data", ".bundle", "bundle.export-12345678")]
    for other in others:
        other.mkdir()
    with staged(tmp_path / "bundle", force=False):
        assert all(other.exists() for other in others)


def test_replaced_bundle_that_cannot_be_removed_stays_beside_the_new_one(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "bundle.json").write_text("old")

    def refuses(path: Path, *, ignore_errors: bool) -> None:
        # As `rmtree` does where `fstat` fails.
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", refuses)
    with staged(tmp_path / "bundle", force=True) as stage:
        (stage / "bundle.json").write_text("new")
    assert (tmp_path / "bundle" / "bundle.json").read_text() == "new"
    assert [(path / "bundle.json").read_text() for path in tmp_path.glob(".bundle.export-*")] == ["old"]


def write_beside_another(output: Path) -> None:
    with staged(output, force=False) as late:
        with staged(output, force=False) as first:
            (first / "bundle.json").write_text("first")
        (late / "bundle.json").write_text("late")


def test_later_of_two_writers_that_may_not_replace_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(OutputExists) as caught:
        write_beside_another(output)
    said = "exists; give force=True (--force) to replace it, or choose another place"
    assert str(caught.value) == f"`{output}` {said}"
    assert (output / "bundle.json").read_text() == "first"
    assert [*tmp_path.iterdir()] == [output]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes_are_those_of_the_umask_which_stays(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with staged(tmp_path / "bundle", force=False) as stage:
            (stage / "bundle.json").write_text("{}")
            (stage / "weights").mkdir()
    finally:
        assert os.umask(before) == umask
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "bundle", tmp_path / "bundle/weights")}
    assert modes == {0o777 & ~umask}
    assert (tmp_path / "bundle/bundle.json").stat().st_mode & 0o777 == 0o666 & ~umask
