"""`make test ROOM=...`: every package of the exporter and of the runtime has tests, which are there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = dict(line.split(": ") for line in (ROOT / "tests/rooms").read_text().splitlines())


def test_every_package_is_a_room():
    places = (ROOT / "aotexport", ROOT / "runtimes/python/aotexport_runtime")
    assert set(ROOMS) == {file.parent.name for place in places for file in place.glob("*/__init__.py")}


@pytest.mark.parametrize("room", ROOMS)
def test_tests_of_a_room_are_there(room):
    assert [path for path in ROOMS[room].split() if not (ROOT / path).exists()] == []


def printed_by_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.dev", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_runs_the_tests_of_a_room():
    assert printed_by_make("ROOM=values").stdout.rstrip().endswith(ROOMS["values"])


def test_every_decision_is_listed_once():
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"^- \[(\d{4})\]\((\S+?)\): ", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(name for _, name in listed) == sorted(path.name for path in folder.glob("0*.md"))
    assert all(name.startswith(number) for number, name in listed)
