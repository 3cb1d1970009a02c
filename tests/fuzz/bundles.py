"""`python -m tests.fuzz.bundles --cases N`: load bundles with mutated files, and run their recorded calls.

Cases are mutations of the golden bundles, each drawn from the seed and its number, so that a run goes on where the last
one ended, and any case can be made again. They run in a process of their own that may end, with bounded memory and
processor time, and an audit of what Python does: a case goes wrong if it crashes, takes long, takes much memory, starts
a process, opens a connection, writes a file or loads a library, or if `load` raises what is no error of ours.

Bundles are drawn by rules and not by coverage of code: what counts is that a case can be repeated after the process
ended, for which drivers such as Atheris and Hypothesis keep no number.
"""

import argparse
import base64
import collections
import hashlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # noqa: TID251 (or each of the processes would import it anew)

import aotexport_runtime
from aotexport_runtime.commands import self_test
from aotexport_runtime.errors import AotExportError
from tests.fuzz.mutations import Mutator

GOLDEN = Path(__file__).parents[1] / "golden"
RESULTS = Path(__file__).parent / "results" / "bundles.json"
CORPUS = Path(__file__).parent / "corpus.jsonl"
SEED = "2026"
CASE_S = 10
_SAVED_CASES = 1000
MOST_NBYTES = 4 << 30
_FORBIDDEN = frozenset(
    (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "subprocess.Popen",
        "socket.connect",
        "socket.bind",
        "ctypes.dlopen",
    )
)


class Sources:
    """The golden bundles in memory, and a directory in which a case lies."""

    def __init__(self, place: Path) -> None:
        self.place = place
        roots = sorted(path.parent for path in GOLDEN.glob("v*/*/bundle/bundle.json"))
        self.files = {
            str(root.relative_to(GOLDEN).parent): {
                str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
            }
            for root in roots
        }
        # Large files change slowly, and have what small ones have.
        self.names = [name for name, files in self.files.items() if sum(map(len, files.values())) < 400_000]

    def case(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Return the golden bundle of a case, and the files that it changes."""
        mutator = Mutator(f"{SEED} {number}")
        name = mutator.random.choice(self.names)
        changed = mutator.changed(self.files[name])
        return name, self.sealed(name, changed) if mutator.random.random() < 0.9 else changed

    def sealed(self, name: str, changed: dict[str, bytes]) -> dict[str, bytes]:
        """Return the files with a manifest whose sizes and digests are those of the changed files."""
        try:
            manifest = json.loads(changed.get("bundle.json", self.files[name]["bundle.json"]))
            for entry in manifest["files"]:
                if entry["path"] in changed:
                    data = changed[entry["path"]]
                    entry["nbytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
        except (ValueError, KeyError, TypeError):
            return changed
        return {**changed, "bundle.json": json.dumps(manifest).encode()}

    def laid(self, name: str, changed: dict[str, bytes]) -> Path:
        """Write a case; return its directory. Files of the golden bundle are written once."""
        root = self.place / name.replace("/", "-")
        if not root.exists():
            for path, data in self.files[name].items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(data)
        for path, data in changed.items():
            (root / path).write_bytes(data)
        return root

    def put_back(self, name: str, changed: Iterable[str]) -> None:
        """Undo the changes of a case."""
        for path in changed:
            (self.place / name.replace("/", "-") / path).write_bytes(self.files[name][path])


def outcome(root: Path, *, run: bool) -> tuple[str, list[str]]:
    """Return what became of a load, and of the recorded calls of a bundle that was loaded: `ok` or names of errors.

    An outcome that begins with `!` is wrong.
    """
    warnings.simplefilter("ignore")
    try:
        bundle = aotexport_runtime.open_bundle(root)
        module = aotexport_runtime.load(bundle)
        del module
    except AotExportError as error:
        return type(error).__name__, []
    except Exception as error:
        return f"!load raises {type(error).__name__}: {str(error)[:80]}", []
    if not run:
        return "ok", []
    try:
        results = self_test.run_vectors(bundle, target="autograd")
    except AotExportError as error:
        return "ok", [type(error).__name__]
    except Exception as error:
        return "ok", [f"!self-test raises {type(error).__name__}: {str(error)[:80]}"]
    return "ok", [(result.error or ("ok" if result.agrees else "differs")).partition(":")[0] for result in results]


def _worker(sources: Sources, numbers: Iterable[int], run: bool, stream: int) -> None:
    """Run cases in this process; write a line as each begins and ends."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_NBYTES, MOST_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    seen = set[str]()
    active = [False]

    def is_in_memory(file: Any) -> bool:
        return isinstance(file, int) and os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:")

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if not active[0]:
            return
        if event == "ctypes.dlopen" and args[0] is None:
            return  # The process itself, for a setting of its allocator.
        if event in _FORBIDDEN:
            seen.add(event)
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+") and not is_in_memory(args[0]):
            seen.add(f"open for writing {args[0]}"[:80])

    sys.addaudithook(audit)
    for number in numbers:
        os.write(stream, f"{number}\n".encode())
        name, changed = sources.case(number)
        root = sources.laid(name, changed)
        signal.setitimer(signal.ITIMER_PROF, CASE_S)
        active[0] = True
        load, runs = outcome(root, run=run)
        active[0] = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        sources.put_back(name, changed)
        if seen:
            load = f"!{sorted(seen)[0]}"
            seen.clear()
        os.write(stream, json.dumps([number, load, runs]).encode() + b"\n")


def cases(sources: Sources, first: int, count: int, *, run: bool) -> Iterator[tuple[int, str, list[str]]]:
    """Yield number, outcome of the load and of its calls of `count` cases from `first`."""
    number = first
    while number < first + count:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                _worker(sources, range(number, min(first + count, number + 2000)), run, writing)
            finally:
                os._exit(0)
        os.close(writing)
        begun = number
        with os.fdopen(reading) as lines:
            for line in lines:
                if line.startswith("["):
                    ended, load, runs = json.loads(line)
                    number = ended + 1
                    yield ended, load, runs
                else:
                    begun = int(line)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            number = begun + 1
            name, _ = sources.case(begun)
            for path in sources.files[name]:
                sources.put_back(name, [path])
            yield begun, f"!{signal.Signals(os.WTERMSIG(status)).name}", []
        elif number == begun and number < first + count:
            raise RuntimeError(f"the process of case {begun} ended without a word")


def corpus(path: Path = CORPUS) -> list[tuple[str, dict[str, bytes]]]:
    """Return cases that once went wrong: golden bundle and changed files."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["golden"], {p: base64.b64decode(data) for p, data in line["files"].items()}) for line in lines]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.bundles", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="cases of the whole record, with those of it")
    parser.add_argument(
        "--runs", type=int, default=200_000, help="recorded calls of the whole record; loads alone after"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--place", type=Path, default=Path("/dev/shm/aotexport-fuzz"))
    parser.add_argument("--keep", type=int, metavar="NUMBER", help="add a case to the corpus, and end")
    options = parser.parse_args()
    sources = Sources(options.place)
    if options.keep is not None:
        name, changed = sources.case(options.keep)
        files = {path: base64.b64encode(data).decode() for path, data in changed.items()}
        with CORPUS.open("a") as file:
            file.write(json.dumps({"golden": name, "files": files}) + "\n")
        return
    record = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"seed": SEED, "torch": torch.__version__, "next": 0}
    )
    loads = collections.Counter[str](record.get("loads", {}))
    runs = collections.Counter[str](record.get("runs", {}))
    wrong = record.get("wrong", [])
    end = time.monotonic() + options.seconds

    def save() -> None:
        record.update(loads=dict(loads.most_common()), runs=dict(runs.most_common()), wrong=wrong)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")

    def note(number: int, load: str, called: list[str]) -> None:
        bad = [text for text in (load, *called) if text.startswith("!")]
        loads["wrong" if load.startswith("!") else load] += 1
        runs.update("wrong" if text.startswith("!") else text for text in called)
        if bad:
            wrong.append([number, *bad])
            print(number, *bad, flush=True)
        record["next"] = number + 1

    while record["next"] < options.cases and time.monotonic() < end:
        count = min(_SAVED_CASES, options.cases - record["next"])
        for case in cases(sources, record["next"], count, run=sum(runs.values()) < options.runs):
            note(*case)
        save()


if __name__ == "__main__":
    main()
