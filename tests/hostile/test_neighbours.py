"""What another process of the machine does to a bundle that is opened: locks, pipes, links, holes, names."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from aotexport_runtime import BundleInvalid, load, open_bundle
from aotexport_runtime.bundle import directory
from tests.hostile.crafted import Crafted
from tests.refusals import refusal

WEIGHTS = "weights/model.safetensors"


@pytest.fixture
def bundle(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("path", ["bundle.json", "README.md", WEIGHTS])
def test_pipe_that_is_exchanged_in_while_files_are_opened_stops_nobody(bundle: Path, path: str) -> None:
    file, pipe = bundle / path, bundle.parent / "pipe"
    shutil.copy(file, bundle.parent / "copy")
    os.mkfifo(pipe)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            os.replace(pipe, file)
            os.mkfifo(pipe)
            os.link(bundle.parent / "copy", bundle.parent / "back")
            os.replace(bundle.parent / "back", file)

    beside = threading.Thread(target=exchange)
    beside.start()
    try:
        for _ in range(200):
            try:
                open_bundle(bundle)
            except BundleInvalid as error:
                assert "missing" in str(error) or "has no file" in str(error)  # noqa: PT017
    finally:
        stop.set()
        beside.join()


@pytest.mark.parametrize(("path", "said"), [("README.md", "leads outside the bundle"), ("weights", "missing")])
def test_links_are_refused_where_the_system_cannot_hold_them_inside(bundle: Path, monkeypatch, path, said) -> None:
    def missing(*_: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(directory, "call", missing)
    assert open_bundle(bundle).program_names
    (bundle / path).rename(bundle / "text")
    (bundle / path).symlink_to("text")
    assert refusal(BundleInvalid, open_bundle, bundle) == f"{path if path == 'README.md' else WEIGHTS}: {said}"


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b", "loop"], ids=["long", "zero", "loop"])
def test_path_that_the_system_refuses_is_one_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BundleInvalid):
        load(tmp_path / path)


def test_holes_of_all_files_together_are_counted(tiny: Path, tmp_path: Path) -> None:
    crafted = Crafted(tiny, tmp_path / "crafted")
    for index in range(3):
        file = crafted.root / f"extra{index}.bin"
        for place in range(5):  # holes of 20 MB between pages of data
            with file.open("ab" if file.exists() else "wb") as stream:
                stream.truncate(place * 20_000_000)
                stream.seek(0, os.SEEK_END)
                stream.write(b"x" * 4096)
        os.truncate(file, 150_000_000)
        crafted.put("manifest", "files/-", {"path": file.name, "nbytes": 150_000_000, "sha256": "0" * 64})
    crafted.write("bundle.json", json.dumps(crafted.document("manifest")).encode())
    with pytest.raises(BundleInvalid) as caught:
        open_bundle(crafted.root, check_digests=False)
    said = "with it, files have more than 268435456 bytes of holes in the place of data"
    assert str(caught.value) == f"extra1.bin: {said}"
