"""`python -m tests.fuzz.guided [READER ...]`: fuzz what reads bytes, guided by the code that inputs reach (Atheris).

An input is read, or refused by an error of ours. Anything else goes wrong: another error, a signal, a read that takes
long or much memory. Documents are mutated as such most of the time. Each reader of `tests.fuzz.readers` runs in a
process of its own, from seeds made of the golden bundles, and from `guided.jsonl`: inputs that once went wrong, and
others that reach code that seeds do not.
"""

from __future__ import annotations

import argparse
import base64
import collections
import json
import math
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fuzz.mutations import Mutator

if TYPE_CHECKING:
    from tests.fuzz.readers import Reader

HERE = Path(__file__).parent
CORPUS, RESULTS = HERE / "guided.jsonl", HERE / "results" / "guided.json"
RUNS = 5_200_000
CASE_S = 20
MOST_MB = 4096
MOST_NBYTES = 1 << 16
_OUTCOMES = ("read", "refused", "wrong")


def corpus() -> dict[str, list[bytes]]:
    """Return the kept inputs of each reader."""
    found = collections.defaultdict[str, list[bytes]](list)
    for line in CORPUS.read_text().splitlines() if CORPUS.exists() else ():
        entry = json.loads(line)
        found[entry["reader"]].append(entry["text"].encode() if "text" in entry else base64.b64decode(entry["base64"]))
    return found


def keep(reader: str, data: bytes) -> None:
    """Add an input to the corpus."""
    try:
        entry = {"reader": reader, "text": data.decode()}
    except UnicodeDecodeError:
        entry = {"reader": reader, "base64": base64.b64encode(data).decode()}
    with CORPUS.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def outcome(reader: Reader, data: bytes) -> str:
    """Return what became of an input: `read`, `refused`, or what went wrong and where."""
    from aotexport_runtime.errors import AotExportError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(data)
    except AotExportError:
        return "refused"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.name}: {str(error)[:120]}"
    return "read"


def _fuzz(reader: Reader, seeds: Path, runs: int, seconds: float, seed: int, wrong: Path, counts: mmap.mmap) -> None:
    """Fuzz a reader in this process, which ends."""
    import atheris

    known = set[str]()
    given = [path.read_bytes() for path in sorted(seeds.glob("seed-*"))]

    def one(data: bytes) -> None:
        result = outcome(reader, data)
        place = 8 * min(("read", "refused", result).index(result), 2)
        counts[place : place + 8] = (int.from_bytes(counts[place : place + 8], "little") + 1).to_bytes(8, "little")
        kind = result.partition(": ")[0]
        if place == 16 and kind not in known:
            known.add(kind)
            (wrong / f"{len(known)}").write_bytes(data)
            (wrong / f"{len(known)}.txt").write_text(result)

    def mutated(data: bytes, most_nbytes: int, seed: int) -> bytes:
        mutator = Mutator(str(seed))
        # Changes of changes are seldom read.
        data = mutator.random.choice(given) if mutator.random.random() < 0.5 else data
        if mutator.random.random() < 0.1:
            return atheris.Mutate(data, most_nbytes)
        try:
            changed = reader.changed(mutator, data)
        except (ValueError, RecursionError, struct.error):
            return atheris.Mutate(data, most_nbytes)
        return changed if len(changed) <= most_nbytes else data

    options = {
        "runs": runs,
        "seed": seed,
        "max_total_time": math.ceil(seconds),
        "timeout": CASE_S,
        "rss_limit_mb": MOST_MB,
        "max_len": MOST_NBYTES,
        "artifact_prefix": f"{wrong}/",
        "mutate_depth": 1,
        "verbosity": 0,
    }
    arguments = [sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(seeds)]
    atheris.Setup(arguments, one, custom_mutator=mutated)
    atheris.Fuzz()


def fuzzed(
    name: str, reader: Reader, place: Path, runs: int, seconds: float, seed: int
) -> tuple[dict[str, int], list[tuple[str, bytes]]]:
    """Return how many inputs were read, refused and went wrong, and an input per way of going wrong.

    Args:
        name: of the reader.
        reader: the reader.
        place: a directory for files; inputs that reach new code are left in `place / name`.
        runs: how many inputs.
        seconds: after which to end; 0: never.
        seed: of the mutations.
    """
    seeds, wrong = place / name, place / f"{name}-wrong"
    for directory in (seeds, wrong):
        directory.mkdir()
    for number, data in enumerate([*reader.seeds(), *corpus()[name]]):
        (seeds / f"seed-{number}").write_bytes(data)
    counts, end = mmap.mmap(-1, 8 * len(_OUTCOMES)), time.monotonic() + seconds
    found: list[tuple[str, bytes]] = []
    while True:
        child = os.fork()
        if not child:
            with (place / f"{name}.log").open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                left = runs - sum(_numbers(counts).values())
                _fuzz(reader, seeds, left, max(end - time.monotonic(), 1) if seconds else 0, seed, wrong, counts)
            finally:
                os._exit(70)
        status = os.waitpid(child, 0)[1]
        found += [(path.read_text(), path.with_suffix("").read_bytes()) for path in sorted(wrong.glob("*.txt"))]
        ended = [path for path in wrong.iterdir() if "-" in path.name]
        found += [(path.name.partition("-")[0], path.read_bytes()) for path in ended]
        if os.waitstatus_to_exitcode(status) == 0:
            return _numbers(counts), found
        if not ended:
            code = os.waitstatus_to_exitcode(status)
            raise RuntimeError(f"{name} ended with {code}:\n{(place / f'{name}.log').read_text()[-2000:]}")
        for path in wrong.iterdir():
            path.unlink()
        seed += 1


def _numbers(counts: mmap.mmap) -> dict[str, int]:
    return {name: int.from_bytes(counts[8 * i : 8 * i + 8], "little") for i, name in enumerate(_OUTCOMES)}


def run(
    names: list[str], runs: int, seconds: float, seed: int, place: Path
) -> Iterator[tuple[str, dict[str, int], Any]]:
    """Fuzz readers, one after the other; yield name, counts and what went wrong of each."""
    import atheris

    with atheris.instrument_imports(include=["aotexport_runtime", "aotexport"], enable_loader_override=False):
        from tests.fuzz.readers import READERS
    chosen = {name: reader for name, reader in READERS.items() if name in names or not names}
    shares = sum(reader.share for reader in chosen.values())
    for name, reader in chosen.items():
        share = runs * reader.share // shares
        yield name, *fuzzed(name, reader, place, share, seconds / len(chosen), seed)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help="names of `tests.fuzz.readers`; default: all")
    parser.add_argument("--runs", type=int, default=RUNS, help="inputs of all readers together")
    parser.add_argument("--seconds", type=float, default=0, help="end after these, of all readers together")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--keep", action="store_true", help="add inputs that went wrong to guided.jsonl")
    parser.add_argument("--record", action="store_true", help="write results/guided.json")
    parser.add_argument("--place", type=Path, help="a new directory for inputs that reach new code")
    options = parser.parse_args()
    # Progress is seen; a fork ends without the caller's handlers.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    record: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"seed": options.seed, "readers": {}}
    )
    wrong = list[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="aotexport-guided-") as directory:
        place = options.place or Path(directory)
        place.mkdir(exist_ok=True)
        begun = time.monotonic()
        for name, counts, found in run(options.readers, options.runs, options.seconds, options.seed, place):
            print(name, json.dumps(counts), *(text for text, _ in found), sep="\n  ", flush=True)
            wrong += [(name, text) for text, _ in found]
            for _, data in found if options.keep else ():
                keep(name, data)
            record["readers"][name] = counts | {"seconds": round(time.monotonic() - begun)}
            begun = time.monotonic()
            if options.record:
                RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
