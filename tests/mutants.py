"""`make mutants ROOM=call N=30`: change one token of a room at a time, and list what the room's tests do not notice.

The room's tests run once, with the lines that each executes. A mutant then meets only those that execute its line, the
quickest first, in a fork of a process that has imported torch. `--keep DIR --seconds 550` ends in time, and the same
command goes on with what is there; rooms share their records.
"""

import argparse
import ast
import contextlib
import importlib
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("aotexport", "runtimes/python/aotexport_runtime")
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
CHUNKS = (12, 60)
"""How many tests a mutant meets first, and then; all others run at last."""
_PAIRS = (("==", "!="), ("<", "<="), (">", ">="), ("+", "-"), ("and", "or"), ("True", "False"), ("continue", "break"))
_OTHER = {"in": "not in", "is": "is not", "not": "", "None": "0", **dict(_PAIRS), **{new: old for old, new in _PAIRS}}


class Mutant(NamedTuple):
    """A token of a file, and what stands in its place."""

    file: Path
    line: int
    column: int
    old: str
    new: str

    def source(self) -> str:
        """Return the changed file."""
        lines = self.file.read_text().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.column] + self.new + line[self.column + len(self.old) :]
        return "".join(lines)

    def is_python(self) -> bool:
        """Return whether the changed file can be read."""
        with contextlib.suppress(SyntaxError):
            return bool(ast.parse(self.source()))
        return False

    def __str__(self) -> str:
        """Return the place and the change."""
        return f"{self.file.relative_to(ROOT)}:{self.line}:{self.column}: `{self.old}` to `{self.new}`"


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield the changes of a file, but of annotations, which are not run, and of what makes records frozen."""
    source = file.read_text()
    passed_over = [
        (each.lineno, each.col_offset, each.end_lineno, each.end_col_offset)
        for node in ast.walk(ast.parse(source))
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None), *_records(node))
        if each is not None
    ]
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for before, each in itertools.pairwise(tokens):
        new = str(int(each.string) + 1) if each.string.isdecimal() else _OTHER.get(each.string)
        if each.string == "None" and before.string in ("is", "not"):
            new = "..."  # Python warns of `is 0`
        if new is None or any(one[:2] <= each.start < one[2:] for one in passed_over):
            continue
        yield Mutant(file, *each.start, each.string, new)


def _records(node: ast.AST) -> list[ast.expr]:
    return node.decorator_list if isinstance(node, ast.ClassDef) else []


class _Recorder:
    """Records the seconds and executed lines of each test; those of fixtures that tests share apart."""

    def __init__(self, lines: Path) -> None:
        include = [f"{package}/*" for package in PACKAGES]
        self._coverage = importlib.import_module("coverage").Coverage(
            data_file=lines, config_file=False, include=include, messages=False
        )
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(f"setup {item.nodeid}")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(f"call {item.nodeid}")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration if report.when == "call" else 0

    def write(self, path: Path) -> None:
        """Write the executed lines, and then the seconds of each test to `path`."""
        self._coverage.stop()
        self._coverage.save()
        path.write_text(json.dumps(self._seconds))


class Tests:
    """The tests of a room, in forks of this process, in a copy of the project.

    Args:
        directory: holds the copy and the records; one that has them is gone on with.
        tests: files and folders of tests.
        end: when to stop, by `time.monotonic`.
    """

    def __init__(self, directory: Path, tests: list[str], end: float = math.inf) -> None:
        self.directory = directory
        self._end = end
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]
        for name in tracked:
            Path(directory, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(directory, name), follow_symlinks=False)
        self._paths = [str(Path(directory, Path(package).parent)) for package in PACKAGES]
        self._seconds: dict[str, float] = {}
        self._records: list[Any] = []
        _import_torch()
        for path in tests:
            for file in sorted(Path(directory, path).rglob("test_*.py")) or [Path(directory, path)]:
                self._record(str(file.relative_to(directory)))

    def _record(self, file: str) -> None:
        """Run the tests of a file, unless their record is there, and read the record."""
        record = Path(self.directory, "records", f"{file}.json")
        record.parent.mkdir(parents=True, exist_ok=True)
        lines = record.with_suffix(".lines")
        if not record.exists():
            lines.unlink(missing_ok=True)
            if how := self._run([file], 1000, lambda: [_Recorder(lines)], record):
                raise SystemExit(f"{file} fails without a change: {how}\n{Path(self.directory, 'output').read_text()}")
        self._seconds |= json.loads(record.read_text())
        self._records.append(importlib.import_module("coverage").CoverageData(lines))
        self._records[-1].read()

    def notice(self, mutant: Mutant) -> str:
        """Return how a mutant is noticed: a test that fails, "time", or nothing."""
        name = mutant.file.relative_to(ROOT)
        Path(self.directory, name).write_text(mutant.source())
        try:
            chosen, start = self._executing(str(name), mutant.line), 0
            for count in (*CHUNKS, len(chosen)):
                some = sorted(chosen[start : start + count])  # Of a file together: they share fixtures.
                if some and (how := self._run(some, 100 + 10 * sum(map(self._seconds.__getitem__, some)))):
                    return how
                start += count
            return ""
        finally:
            shutil.copy2(mutant.file, Path(self.directory, name))

    def _executing(self, file: str, line: int) -> list[str]:
        """Return the tests that execute a line: the quickest first, then those whose files' fixtures do; else all."""
        records = [each.contexts_by_lineno(str(Path(self.directory, file))) for each in self._records]
        phases = {each for record in records for each in record.get(line, ()) if each}
        phases = phases or {each for record in records for all_ in record.values() for each in all_ if each}
        called = {each.removeprefix("call ") for each in phases if each.startswith("call ")}
        files = {each.split(" ", 1)[1].split("::")[0] for each in phases if each.startswith("setup ")}
        shared = [each for each in self._seconds if each not in called and each.split("::")[0] in files]
        random.Random(0).shuffle(shared)
        return sorted(called, key=self._seconds.__getitem__) + shared or sorted(
            self._seconds, key=self._seconds.__getitem__
        )

    def _run(self, tests: list[str], most_s: float, plugins: Any = list, record: Path | None = None) -> str:
        process = os.fork()
        if not process:
            code = 1
            try:
                code = self._enter(tests, plugins(), record)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        until = time.monotonic() + most_s
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > min(until, self._end):
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                if time.monotonic() > self._end:
                    raise SystemExit("the time is over; the same command goes on")
                return "time"
            time.sleep(0.02)
        if not ended[1]:
            return ""
        lines = Path(self.directory, "output").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"status {ended[1]}")

    def _enter(self, tests: list[str], plugins: list[Any], record: Path | None) -> int:
        os.setsid()
        os.chdir(self.directory)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path[:0] = self._paths
        os.environ |= {"PYTHONPATH": os.pathsep.join(self._paths), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        code = pytest.main([*OPTIONS, *tests], plugins=plugins)
        if record is not None:
            plugins[0].write(record)
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)  # All are slow.


def _import_torch() -> None:
    """Import what most tests import, and what an export of torch imports."""
    torch: Any = importlib.import_module("torch")
    for name in ("hypothesis", "numpy", "transformers", "torch._inductor.config"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),)).run_decompositions()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("room", help="a room of tests/rooms")
    parser.add_argument("n", type=int, help="how many changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for records and results: the next run goes on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after them")
    options, end = parser.parse_args(), time.monotonic()
    rooms = dict(line.split(": ") for line in (ROOT / "tests/rooms").read_text().splitlines())
    if options.room not in rooms:
        parser.error(f"no room `{options.room}`; there are {', '.join(rooms)}")
    files = [file for package in PACKAGES for file in (ROOT / package / options.room).rglob("*.py")]
    drawn = [each for file in sorted(files) for each in mutants(file)]
    random.Random(options.seed).shuffle(drawn)
    left = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as new:
        directory = (options.keep or Path(new)).absolute()
        tests = Tests(directory, rooms[options.room].split(), end + options.seconds)
        Path(directory, "ended").touch()
        ended = dict(line.split("\t") for line in Path(directory, "ended").read_text().splitlines())
        for number, mutant in enumerate(itertools.islice(filter(Mutant.is_python, drawn), options.n), 1):
            if (how := ended.get(str(mutant))) is None:
                how = tests.notice(mutant) or "NOT noticed"
                with Path(directory, "ended").open("a") as file:
                    print(mutant, how, sep="\t", file=file)
            left += how == "NOT noticed"
            print(f"{number - left} of {number} noticed; {mutant}: {how}", flush=True)
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
