"""Exports that are kept: the same one is written byte by byte, any difference exports anew, damage is noticed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aotexport.cache.entries import Damaged, Entries
from aotexport.cli import app
from tests.forked import run_script

MODEL = """
import json, os
from pathlib import Path
import torch
from torch import nn
import layers

torch.manual_seed(0)
SHIFT = 1.0

def activation(by):
    return lambda x: torch.relu(x) * by

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = activation(1.5)
        self.depth = 2

    def forward(self, x):
        for _ in range(self.depth):
            x = self.act(self.linear(x)) + SHIFT + layers.BIAS
        return x * float(Path("scale.txt").read_text()) * int(os.environ.get("FACTOR", 1))

model = Net()
# weights
example_inputs = (torch.ones(4, 3),)
"""
FOUND = "write the bundle from the cache"

# What `python -m aotexport` does, in a process that has imported torch.
COMMAND = """
import os, sys
os.environ["PYTHONHASHSEED"] = "0"
from aotexport.cli import app
app.main(sys.argv[1:], prog_name="aotexport", obj=True)
"""


class User:
    """Runs exports in a directory, with a cache."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.store = folder / "project", folder / "cache"
        self.folder.mkdir()
        (self.folder / "model.py").write_text(MODEL)
        (self.folder / "layers.py").write_text("BIAS = 0.5\n")
        (self.folder / "scale.txt").write_text("2.0")
        monkeypatch.setenv("AOTEXPORT_CACHE", str(self.store))
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)

    def export(self, *options: str, cwd: Path | None = None, text: str = COMMAND, model: str = "model.py") -> str:
        """Export to `bundle`; return what was told."""
        arguments = (model, "-o", "bundle", "--force", "--program", "infer", *options)
        done = run_script(None, *arguments, cwd=cwd or self.folder, text=text)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def files(self, cwd: Path | None = None) -> dict[str, bytes]:
        bundle = (cwd or self.folder) / "bundle"
        return {str(path.relative_to(bundle)): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}

    def entry(self) -> Path:
        (entry,) = (path for path in self.store.iterdir() if not path.name.startswith("."))
        return entry


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch)


def test_same_export_is_written_byte_by_byte_also_of_a_copy_elsewhere(user: User, tmp_path: Path) -> None:
    assert FOUND not in user.export("--fast")
    first = user.files()
    assert FOUND in user.export("--fast")
    assert user.files() == first
    shutil.copytree(user.folder, tmp_path / "other", ignore=shutil.ignore_patterns("bundle"))
    assert FOUND in user.export("--fast", cwd=tmp_path / "other")
    assert user.files(tmp_path / "other") == first


def _edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return edit


CHANGES: dict[str, Any] = {
    "weights": _edit("model.py", "# weights", "model.linear.weight.data[0, 0] += 1e-6"),
    "attribute": _edit("model.py", "# weights", "model.depth = 3"),
    "closure": _edit("model.py", "activation(1.5)", "activation(1.25)"),
    "global": _edit("model.py", "SHIFT = 1.0", "SHIFT = 1.5"),
    "example": _edit("model.py", "torch.ones(4, 3)", "torch.ones(5, 3)"),
    "source_of_a_helper": _edit("layers.py", "0.5", "0.25"),
    "file_that_the_call_reads": _edit("scale.txt", "2.0", "3.0"),
    "line_of_the_code": _edit("model.py", "    def forward", "\n    def forward"),
    "option": ("--strip",),
    "variable": {"FACTOR": "2"},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):
    """Give a directory with an export that is kept."""
    with pytest.MonkeyPatch.context() as patch:
        user = User(tmp_path_factory.mktemp("kept"), patch)
        user.export("--no-verify")
        yield user


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_exports_anew(change: Any, exported: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    folder = tmp_path / "changed"
    shutil.copytree(exported.folder, folder)
    options = change if isinstance(change, tuple) else ()
    for name, value in change.items() if isinstance(change, dict) else ():
        monkeypatch.setenv(name, value)
    if callable(change):
        change(folder)
    assert FOUND not in exported.export("--no-verify", *options, cwd=folder)
    assert exported.files(folder) != exported.files()
    assert FOUND in exported.export("--no-verify", *options, cwd=folder)


def test_other_working_directory_exports_anew(user: User, tmp_path: Path) -> None:
    user.export("--no-verify")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "scale.txt").write_text("5.0")
    told = user.export("--no-verify", cwd=tmp_path / "other", model="../project/model.py")
    assert FOUND not in told


def test_no_cache_neither_finds_nor_keeps(user: User) -> None:
    user.export("--no-verify", "--no-cache")
    assert not user.store.exists()
    user.export("--no-verify")
    assert FOUND not in user.export("--no-verify", "--no-cache")


@pytest.mark.parametrize("file", ["bundle/programs/infer/forward.json", "entry.json"])
def test_damaged_entry_is_noticed_and_replaced(file: str, user: User) -> None:
    user.export("--no-verify")
    first, damaged = user.files(), user.entry() / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert user.export("--no-verify").endswith("exported anew: the copy in the cache is damaged\n")
    assert user.files() == first
    assert FOUND in user.export("--no-verify")


def test_file_written_while_the_export_runs_keeps_nothing(user: User) -> None:
    _edit("model.py", "import layers", "Path(__file__).with_name('layers.py').touch(); import layers")(user.folder)
    told = user.export("--no-verify")
    assert told.endswith("not kept: `layers.py` was written while the export ran\n")
    assert FOUND not in user.export("--no-verify")


def test_object_that_cannot_be_read_is_named_and_keeps_nothing(user: User) -> None:
    _edit("model.py", "# weights", "model.log = open(os.devnull)")(user.folder)
    told = user.export("--no-verify")
    with Path(os.devnull).open() as file, pytest.raises(TypeError) as pickled:
        file.__reduce_ex__(2)
    reason = f"an object of `_io.TextIOWrapper` (TypeError: {pickled.value})"
    assert told.endswith(f"not kept: the model, its code or its arguments hold {reason}\n")


def test_full_disk_keeps_nothing_and_harms_no_export(user: User) -> None:
    _edit("model.py", "# weights", "model.table = torch.arange(300_000).float()")(user.folder)
    limited = COMMAND.replace(
        "app.main",
        "import resource\nfrom aotexport.cache import entries\nkeep = entries.Entries.keep\n"
        "def limited(*given):\n    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n    keep(*given)\n"
        "entries.Entries.keep = limited\napp.main",
    )
    assert user.export("--no-verify", text=limited).endswith("not kept: File too large\n")
    assert list(user.store.iterdir()) == []
    assert (user.folder / "bundle" / "bundle.json").is_file()


def test_larger_than_the_cache_is_not_kept(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTEXPORT_CACHE_SIZE", "1000")
    assert "not kept: it has " in user.export("--no-verify").splitlines()[-1]


# --- the directory of entries -----------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "bundle" / "weights").mkdir(parents=True)
    (tmp_path / "bundle" / "weights" / "0.bin").write_bytes(os.urandom(1000))
    return tmp_path / "bundle"


def test_entries_not_used_lately_make_room(bundle: Path, tmp_path: Path) -> None:
    entries = Entries(tmp_path / "cache", 4000)
    for number, key in enumerate(("one", "two", "three")):
        entries.keep(key, bundle, {"number": number})
        os.utime(tmp_path / "cache" / key, (number, number))
    assert entries.find("one") is not None  # and is used now
    entries.keep("four", bundle, {})
    assert {path.name for path, _, _ in entries.listed()} == {"one", "four", "three"}


RACE = """
import sys
from pathlib import Path
from aotexport.cache.entries import Damaged, Entries

folder, name = Path(sys.argv[1]), sys.argv[2]
entries, whole = Entries(folder / "cache", 2500), 0
for round in range(100):
    key = f"key{round % 3}"
    try:
        found = entries.find(key)
        if found is not None:
            found.write(folder / f"{name}.{round}")
            assert found.kept == {"key": key}
            assert (folder / f"{name}.{round}" / "weights" / "0.bin").read_bytes() == bytes(1000)
            whole += 1
        else:
            entries.keep(key, folder / "bundle", {"key": key})
    except Damaged:
        entries.remove(key)
print(whole)
"""


def test_processes_at_once_find_whole_entries_or_none(bundle: Path, tmp_path: Path) -> None:
    (bundle / "weights" / "0.bin").write_bytes(bytes(1000))
    command = [sys.executable, "-W", "error", "-c", RACE, str(tmp_path)]
    processes = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "abc"]
    found = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(map(int, found)) > 0


def test_missing_file_is_damage(bundle: Path, tmp_path: Path) -> None:
    entries = Entries(tmp_path / "cache", 4000)
    entries.keep("key", bundle, {})
    (tmp_path / "cache" / "key" / "bundle" / "weights" / "0.bin").unlink()
    found = entries.find("key")
    assert found is not None
    with pytest.raises(Damaged):
        found.write(tmp_path / "copy")


def test_command_shows_and_clears(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTEXPORT_CACHE", str(tmp_path / "cache"))
    Entries(tmp_path / "cache", 4000).keep("key", bundle, {})
    nbytes = 1000 + (tmp_path / "cache" / "key" / "entry.json").stat().st_size
    shown = CliRunner().invoke(app, ["cache"]).stdout.splitlines()
    assert shown[0] == f"1 bundles, {nbytes:,} bytes, in {tmp_path / 'cache'}"
    cleared = CliRunner().invoke(app, ["cache", "--clear"]).stdout.splitlines()
    assert cleared == [f"1 bundles, {nbytes:,} bytes, removed from {tmp_path / 'cache'}"]
    assert CliRunner().invoke(app, ["cache"]).stdout.startswith("0 bundles")


@pytest.mark.slow
def test_command_of_a_user_finds_its_bundle(user: User) -> None:
    command = [*("-X", "importtime", "-m", "aotexport"), "model.py", "--force", "--json", "-o", "bundle"]
    documents = []
    for _ in range(2):
        done = subprocess.run([sys.executable, *command], cwd=user.folder, capture_output=True, text=True, check=True)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line}
        imported &= {"sympy", "torch", "torch._dynamo"}
        documents.append((json.loads(done.stdout), user.files(), imported))
    (first, files, of_first), (second, again, of_second) = documents
    assert (of_first, of_second) == ({"sympy", "torch", "torch._dynamo"}, {"torch"})
    assert files == again
    assert (first["from_cache"], second["from_cache"]) == (False, True)
    assert first["verification"] == second["verification"] != []
