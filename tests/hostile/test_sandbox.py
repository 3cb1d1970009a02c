"""A process in the sandbox runs a bundle, and refuses what an operator of it tries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotexport_runtime import ArgumentInvalid, NotSupported, sandbox
from tests.hostile.attempts import ATTEMPTS, FILES
from tests.hostile.crafted import Crafted
from tests.refusals import refusal

try:
    version = sandbox._landlock_version()
except NotSupported:
    version = 0
pytestmark = pytest.mark.skipif(not version, reason="the kernel has no Landlock")

SECCOMP = 317
SCOPES_SINCE = 6
"""The version of Landlock that refuses signals to processes outside."""


def outcomes(crafted: Crafted, place: Path, *options: str) -> tuple[int, dict[str, str], str]:
    """Return exit code, outcome per attempt and last line of a self-test whose graphs make all attempts."""
    place.mkdir()
    for name in FILES:
        (place / name).write_text(name)
    command = [sys.executable, "-m", "aotexport_runtime", "selftest", str(crafted.root), "--target", "autograd"]
    command += ["--import", "tests.hostile.attempts", "--operator-namespace", "hostile", *options]
    environment = {**os.environ, "TRIED": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.partition(":")[0] in ATTEMPTS)
    return done.returncode, lines, (done.stdout + done.stderr).splitlines()[-1]


@pytest.fixture
def trying(crafted: Crafted) -> Crafted:
    """A bundle whose forward graphs make every attempt."""
    crafted.put("manifest", "requirements/operator_namespaces", ["hostile"])
    for number in range(len(ATTEMPTS)):
        crafted.node("forward", name=f"crafted_{number}", op="hostile::attempt.default", args=["linear", number])
    crafted.seal()
    return crafted


def test_operator_that_tries_is_refused_and_the_bundle_runs(trying: Crafted, tmp_path: Path) -> None:
    code, found, last = outcomes(trying, tmp_path / "place", "--sandbox")
    expected = dict.fromkeys(ATTEMPTS, "refused")
    if version < SCOPES_SINCE:
        expected["signal_to_another_process"] = "done"
    assert (code, found) == (0, expected), last
    left = {path.name: path.read_text() for path in (tmp_path / "place").iterdir()}
    assert left == {name: name for name in FILES}


@pytest.mark.slow
def test_operator_that_tries_succeeds_outside_of_the_sandbox(trying: Crafted, tmp_path: Path) -> None:
    code, found, last = outcomes(trying, tmp_path / "place")
    assert (code, found) == (0, dict.fromkeys(ATTEMPTS, "done")), last


def run(text: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_what_may_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    text = """
import pathlib, sys
from aotexport_runtime import sandbox
sandbox.enter(readable=[], writable=[sys.argv[1]])
place = pathlib.Path(sys.argv[1])
(place / "new").write_text("new")
print((place / "new").read_text())
for act in (lambda: (place.parent / "new").write_text("new"), lambda: list(place.parent.iterdir())):
    try:
        act()
    except PermissionError as error:
        print(error.strerror)
"""
    done = run(text, tmp_path / "out")
    assert (done.stdout, done.stderr) == ("new\nPermission denied\nPermission denied\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_library_is_looked_for_without_a_compiler() -> None:
    done = run("""
from aotexport_runtime import sandbox
sandbox.enter()
from ctypes import util
print(util.find_library("dl"))
""")
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_process_with_threads_does_not_enter() -> None:
    done = run("""
import threading
from aotexport_runtime import sandbox
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    sandbox.enter()
except Exception as error:
    print(type(error).__name__, error)
open("/dev/null", "w")
""")
    assert (done.stdout, done.stderr) == (
        "NotSupported the process has 2 threads, and only the one that calls would enter the sandbox; call "
        "`sandbox.enter` first, before torch and numpy are imported\n",
        "",
    )


def test_path_that_does_not_exist_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["one"])
    assert refusal(ArgumentInvalid, sandbox.enter, readable=["/nothing"]) == "no file or directory `/nothing`"


@pytest.mark.parametrize(
    ("lacked", "error", "text"),
    [
        (SECCOMP, OSError(22, "Invalid argument"), "has no filters of seccomp (Invalid argument); "),
        (
            None,
            OSError(38, "Function not implemented"),
            "has no Landlock (Function not implemented): it needs Linux 5.13, with `landlock` among its security "
            "modules (`lsm=`); ",
        ),
    ],
)
def test_kernel_without_filters_or_landlock_is_named(
    monkeypatch: pytest.MonkeyPatch, lacked: int | None, error: OSError, text: str
) -> None:
    call = sandbox.call

    def lacks(number: int, *arguments: bytes | int | None) -> int:
        if lacked in (None, number):
            raise error
        return call(number, *arguments)

    monkeypatch.setattr(sandbox, "call", lacks)
    said = refusal(NotSupported, sandbox.enter)
    assert said == f"the kernel {text}run the process in a container without network instead"
