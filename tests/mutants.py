"""`make mutants ROOM=call N=30`: change one token of a room at a time, and list what the room's tests do not notice."""

import argparse
import ast
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("aotexport", "runtimes/python/aotexport_runtime")
MOST_S = 1200
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

    def __str__(self) -> str:
        """Return the place and the change."""
        return f"{self.file.relative_to(ROOT)}:{self.line}:{self.column}: `{self.old}` to `{self.new}`"


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield the changes of a file that are Python, but for annotations, which are not run."""
    source = file.read_text()
    annotations = [
        (each.lineno, each.col_offset, each.end_lineno, each.end_col_offset)
        for node in ast.walk(ast.parse(source))
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if each is not None
    ]
    for each in tokenize.generate_tokens(io.StringIO(source).readline):
        new = str(int(each.string) + 1) if each.string.isdecimal() else _OTHER.get(each.string)
        if new is None or any(one[:2] <= each.start < one[2:] for one in annotations):
            continue
        mutant = Mutant(file, *each.start, each.string, new)
        try:
            ast.parse(mutant.source())
        except SyntaxError:
            continue
        yield mutant


def is_noticed(mutant: Mutant, tests: list[str], workers: int) -> bool:
    """Return whether a test fails, or the tests do not end, in a copy of the project that has the change."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]
        for name in tracked:
            Path(directory, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(directory, name), follow_symlinks=False)
        Path(directory, mutant.file.relative_to(ROOT)).write_text(mutant.source())
        paths = os.pathsep.join(str(Path(directory, Path(package).parent)) for package in PACKAGES)
        options = f"-x -q -n {workers} --dist loadfile".split()
        command = [sys.executable, "-m", "pytest", *options, "-m", "not slow", *tests]
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=MOST_S)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("room", help="a room of tests/rooms")
    parser.add_argument("n", type=int, help="how many changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rooms = dict(line.split(": ") for line in (ROOT / "tests/rooms").read_text().splitlines())
    if options.room not in rooms:
        parser.error(f"no room `{options.room}`; there are {', '.join(rooms)}")
    files = [file for package in PACKAGES for file in (ROOT / package / options.room).rglob("*.py")]
    chosen = random.Random(options.seed).sample([each for file in sorted(files) for each in mutants(file)], options.n)
    left = []
    for number, mutant in enumerate(chosen, 1):
        noticed = is_noticed(mutant, rooms[options.room].split(), options.workers)
        left += [] if noticed else [mutant]
        result = "noticed" if noticed else "NOT noticed"
        print(f"{number - len(left)} of {number} noticed; {mutant}: {result}", flush=True)
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
