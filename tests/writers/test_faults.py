"""Saves over a bundle with a fault at every call that changes files: at the path is the old bundle or the new one."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preload import preloaded
from tests.writers.faults import KILL, SHORT, Save

FAULTS = {
    "killed": KILL,
    "disk_full": errno.ENOSPC,
    "broken_disk": errno.EIO,
    "interrupted": errno.EINTR,
    "no_right": errno.EACCES,
    "short_write": SHORT,
}
REMOVALS = ("unlink", "unlinkat", "rmdir")


def saves(base: Path, place: Path, step: int, *faults: int) -> list[Save]:
    command = [sys.executable, "-m", "tests.writers.faults", str(base), str(place), *map(str, (step, *faults))]
    with preloaded(Path(__file__).with_name("faults.c")) as environment:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Save(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def some(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Save]:
    return saves(tiny, tmp_path_factory.mktemp("faults"), 9, KILL, errno.ENOSPC)


def check(save: Save) -> None:
    if save.ended == "killed":
        assert save.found in ("old", "new")
        assert all(name.startswith(".bundle.export-") for name in save.left)
        return
    assert save.found == ("new" if save.ended == "done" else "old")
    assert save.ended in ("done", "NotWritten", "OutputExists") or save.fault in (errno.EACCES, errno.EINTR)
    # What cannot be removed stays.
    assert save.left == [] or save.calls[save.call][0] in REMOVALS


def test_save_that_is_killed_or_finds_the_disk_full_leaves_the_old_bundle_or_the_new_one(some: list[Save]) -> None:
    assert {save.ended for save in some} >= {"done", "killed", "NotWritten"}
    assert {save.found for save in some} == {"old", "new"}
    for save in some:
        check(save)


def test_save_over_a_quota_or_on_a_read_only_disk_is_one_error_and_leaves_the_old_bundle(
    tiny: Path, tmp_path: Path
) -> None:
    whole, *found = saves(tiny, tmp_path, 25, errno.EDQUOT, errno.EROFS)
    assert whole.ended == "done"
    assert {save.ended for save in found} >= {"NotWritten"}
    for save in found:
        check(save)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_save_with_a_fault_leaves_the_old_bundle_or_the_new_one(tiny: Path, tmp_path: Path, fault: int) -> None:
    found = saves(tiny, tmp_path, 1, fault)
    assert len(found) > 100
    for save in found:
        check(save)


def test_files_and_the_directories_that_name_them_are_on_the_disk_before_they_replace_others(
    some: list[Save], tiny: Path
) -> None:
    calls = [(name, path) for name, path, _ in some[0].calls]
    moved = next(at for at, (name, _) in enumerate(calls) if name == "rename")
    stage = calls[moved][1]
    for path in (tiny, *tiny.rglob("*")):
        place = stage if path == tiny else f"{stage}/{path.relative_to(tiny)}"
        synced = calls.index(("fsync", place))
        changed = [at for at, (_, other) in enumerate(calls[:moved]) if place in (other, str(Path(other).parent))]
        assert [calls[at] for at in changed if at > synced and calls[at][0] != "fsync"] == []
        assert synced < moved
    assert ("fsync", str(Path(stage).parent)) in calls[moved:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_save_with_a_fault_at_a_system_call_of_any_kind_leaves_the_old_bundle_or_the_new_one(
    tiny: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.writers.traced", str(tiny), str(tmp_path), "16"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    whole, *found = [Save(**json.loads(line)) for line in done.stdout.splitlines()]
    assert (whole.ended, whole.found, whole.left) == ("done", "new", [])
    assert len(found) > 50
    assert sum(save.ended == "killed" for save in found) >= len(found) // 2 - 5
    for save in found:
        # The fault may come after the save, and then nobody says how it ended.
        assert save.found == {"done": "new", "killed": save.found, "": "new"}.get(save.ended, "old"), save
        assert save.found in ("old", "new")
        assert all(name.startswith(".bundle.export-") for name in save.left)
