"""A shard of a sweep: every so many-th of its items, run in a process of its own."""

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.sweeps import table
from tests.sweeps.sample import Sample

SWEEPS = {
    "op_db": ("operators", 16),
    "module_db": ("modules", 4),
    "bodies": ("bodies", 1),
    "programs": ("programs", 1),
    "zoo": ("zoo", 48),
    "detection": ("detection", 4),
    "libraries": ("libraries", 24),
    "torch_export": ("torch_export", 48),
}
"""Per sweep the module of this package with its `items()` and `EXCLUDED`, and the number of shards."""

PEERS = ("torch_export",)
"""Sweeps that run another exporter; their modules have a `run` of their own."""

LIBRARIES = (
    "timm==1.0.31",
    "torchvision==0.28.0",
    "diffusers==0.42.1",
    "torch_geometric==2.8.1",
    "segmentation_models_pytorch==0.6.0",
)
NEEDS = {"libraries": LIBRARIES, "torch_export": LIBRARIES}
"""Packages that a sweep needs beside the project's dependencies, of the releases that its table is of."""

TIMEOUT_S = 1200
ROOT = Path(__file__).parents[2]


def missing(sweep: str) -> str | None:
    """Return a sentence with what to install before a sweep can run; None: nothing."""
    needed = [package for package in NEEDS.get(sweep, ()) if importlib.util.find_spec(package.split("==")[0]) is None]
    return f"sweep `{sweep}` needs packages: pip install {' '.join(needed)}" if needed else None


def rows_of(sweep: str, index: int) -> dict[str, str]:
    """Return the rows of a shard, run in fresh processes; an item that ends its process is a crash.

    Raises:
        RuntimeError: the process fails before its first item or after its last.
    """
    crashed: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="sweep-") as directory:
            command = [sys.executable, "-W", "ignore", "-m", "tests.sweeps.shard"]
            command += [sweep, str(index), directory, *crashed]
            # One thread and one order of sets, so that a run gives what the one before gave.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
            try:
                process = subprocess.run(
                    command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=TIMEOUT_S
                )
                last = (process.stderr.strip().splitlines() or [""])[-1]
                end = f"the process ended with {process.returncode}: {last[:200]}"
            except subprocess.TimeoutExpired:
                end = f"the process took longer than {TIMEOUT_S} s"
            else:
                if process.returncode == 0:
                    return {**table.read(Path(directory, "rows.tsv")), **crashed}
            begun = Path(directory, "begun")
            item = begun.read_text() if begun.exists() else ""
            if not item:
                raise RuntimeError(f"{' '.join(command)}: {end}: {process.stderr[-2000:]}")
            crashed[item] = table.row([table.Outcome(table.CRASHED, end)])


def main() -> None:
    """Run a shard in this process; write its rows to `rows.tsv`, and the item that has begun to `begun`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("index", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("skip", nargs="*", help="items to leave out")
    options = parser.parse_args()
    name, shards = SWEEPS[options.sweep]
    # torch's collections come with these modules, so that only the shard's process imports them.
    module = importlib.import_module(f"tests.sweeps.{name}")
    run = importlib.import_module(f"tests.sweeps.{name if name in PEERS else 'run'}").run
    items = {item: make for item, make in module.items().items() if not _excluded(item, module.EXCLUDED)}
    begun = options.directory / "begun"

    def samples() -> Iterator[tuple[str, Sample]]:
        for item in sorted(items)[options.index :: shards]:
            if item not in options.skip:
                begun.write_text(item)
                yield from ((item, sample) for sample in items[item]())
        begun.write_text("")

    rows = {item: table.row(outcomes) for item, outcomes in run(samples(), options.directory).items()}
    reasons = {item: table.excluded(module.EXCLUDED[item]) for item in sorted(module.EXCLUDED)[options.index :: shards]}
    table.write(options.directory / "rows.tsv", {**rows, **reasons})


def _excluded(item: str, reasons: dict[str, str]) -> bool:
    """Return whether an item is left out, by its own name or with all that the first word names."""
    return item in reasons or item.split(" ")[0] in reasons


if __name__ == "__main__":
    main()
