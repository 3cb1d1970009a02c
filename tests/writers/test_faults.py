"""Saves over a bundle with a fault at a call that changes files, or a power failure: the old bundle or the new one."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aotexport_runtime
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def some(tiny: Path, place: Path) -> list[Save]:
    return saves(tiny, place, 12, KILL, errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def check(save: Save) -> None:
    if save.ended == "killed":
        assert save.found in ("old", "new")
        assert all(name.startswith(".bundle.export-") for name in save.left)
        return
    assert save.found == ("new" if save.ended == "done" else "old")
    assert save.ended in ("done", "NotWritten", "OutputExists") or save.fault in (errno.EACCES, errno.EINTR)
    # What cannot be removed stays.
    assert save.left == [] or save.calls[save.call][0] in REMOVALS


def test_save_that_is_killed_or_cannot_write_leaves_the_old_bundle_or_the_new_one(some: list[Save]) -> None:
    assert {save.ended for save in some} >= {"done", "killed", "NotWritten"}
    assert {save.found for save in some} == {"old", "new"}
    for save in some:
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


# --- power failures -----------------------------------------------------------------------------------------


class Disk:
    """What may be at the path of a bundle after a power failure: nothing that was not synced, nothing that was removed.

    Attributes:
        may_be: the bundles, `old` or `new`, whose directory the disk may have at the path.
        synced: files and directories of the new bundle that are on the disk.
        removed: files and directories of the old one that may have gone.
    """

    def __init__(self, stage: Path) -> None:
        self.stage, self.is_at_path = stage, "old"
        self.may_be = {"old"}
        self.synced: set[Path] = set()
        self.removed: set[Path] = set()

    def follow(self, name: str, path: Path) -> None:
        """Take one call into account."""
        if name == "renameat2":
            self.is_at_path = "new"
            self.may_be.add("new")
        elif name == "fsync" and path == self.stage.parent:
            self.may_be = {self.is_at_path}
        elif path.is_relative_to(self.stage) and name != "rename":  # Which fails: there is a bundle.
            at = path.relative_to(self.stage)
            if name == "fsync":
                self.synced.add(at)
            elif self.is_at_path == "new":
                self.removed.add(at)
            else:
                self.synced -= {at, at.parent}

    def restore(self, bundle: str, source: Path, place: Path) -> None:
        """Write what the disk has of a bundle to `place`."""
        shutil.rmtree(place, ignore_errors=True)
        for directory, _, files in os.walk(source):
            at = Path(directory).relative_to(source)
            if bundle == "new" and at not in self.synced:
                continue
            (place / at).mkdir(parents=True, exist_ok=True)
            for file in files:
                if bundle == "old" and at / file not in self.removed:
                    shutil.copy(source / at / file, place / at)
                elif bundle == "new":
                    content = (source / at / file).read_bytes() if at / file in self.synced else b""
                    (place / at / file).write_bytes(content)


def found_after_power_loss(calls: list[list[str]], bundles: dict[str, Path], place: Path) -> Iterator[tuple[str, str]]:
    """Yield, for a failure after each call, the bundle that may be at the path, and the one that is read there."""
    disk = Disk(next(Path(path) for name, path, _ in calls if name == "renameat2"))
    digests = {weights(path): name for name, path in bundles.items()}
    for name, path, _ in calls:
        disk.follow(name, Path(path))
        for bundle in disk.may_be:
            disk.restore(bundle, bundles[bundle], place)
            try:
                yield bundle, digests[weights(place)]
            except aotexport_runtime.BundleInvalid as error:
                yield bundle, str(error)


def weights(path: Path) -> tuple[str, ...]:
    files = aotexport_runtime.open_bundle(path).manifest.files
    return tuple(entry.sha256 for entry in files if entry.path.startswith("weights"))


@pytest.fixture
def save(some: list[Save], tiny: Path, place: Path) -> tuple[list[list[str]], dict[str, Path]]:
    """Return the calls of a save that change or sync files, and the old and the new bundle."""
    return some[0].calls, {"old": tiny, "new": place / "changed"}


def test_power_loss_at_any_call_leaves_the_old_bundle_or_the_new_one(save, tmp_path: Path) -> None:
    calls, bundles = save
    found = list(found_after_power_loss(calls, bundles, tmp_path / "bundle"))
    assert len(found) > len(calls) > 80
    assert [(may_be, read) for may_be, read in found if may_be != read] == []
    assert [read for _, read in found][:: len(found) - 1] == ["old", "new"]


@pytest.mark.parametrize("forgotten", ["weights/model.safetensors", ".."])
def test_sync_that_is_left_out_loses_a_bundle(save, tmp_path: Path, forgotten: str) -> None:
    calls, bundles = save
    stage = next(path for name, path, _ in calls if name == "renameat2")
    place = os.path.normpath(os.path.join(stage, forgotten))
    kept = [call for call in calls if call[:2] != ["fsync", place]]
    assert len(kept) < len(calls)
    assert any(may_be != read for may_be, read in found_after_power_loss(kept, bundles, tmp_path / "bundle"))
