"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks import machine, plots, report
from benchmarks.artefacts import Artefacts
from benchmarks.figures import Figure
from benchmarks.meters import wall_s
from benchmarks.models import MODELS
from benchmarks.processes import Settings
from benchmarks.run import MAIN_MODELS, Run
from benchmarks.suites import SUITES
from benchmarks.systems import SYSTEMS

_EPILOG = """\
examples:
  python -m benchmarks --suite train,infer --models gpt2 --rounds 15
  python -m benchmarks --suite start,memory --systems eager,portable --markdown figures.md --json figures.json

Times are medians over rounds in which every system runs once, in a process of its own. Relative values are taken
round by round; their quartiles show the noise. `cpu` is the processor time of all threads: on a machine that others
use, trust it more than `wall`.
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables, write files; return the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings(options.threads, options.limit_s, wall_s() + 60 * options.minutes)
    progress = _Progress()
    with _kept(options.artefacts) as directory:
        run = Run(
            model_names=options.models,
            system_names=options.systems,
            rounds=options.rounds,
            round_s=options.round_s,
            settings=settings,
            artefacts=Artefacts(directory, settings, progress),
            progress=progress,
            scale_steps=options.scale_steps,
        )
        document = _Document(options, run.artefacts.notes)
        try:
            _measure(run, document)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        finally:
            document.write()
            document.plot()
    return 0


def _measure(run: Run, document: _Document) -> None:
    for name in tuple(document.missing):
        for figure in SUITES[name].figures(run):
            document.figures.append(figure)
            document.write()
        document.missing.remove(name)
        own = [figure for figure in document.figures if figure.suite == name]
        if own:
            print(report.text(SUITES[name], own), end="\n\n", flush=True)
    for note in run.artefacts.notes:
        print(f"note: {note}")
    print(", ".join(f"{name}: {value}" for name, value in document.machine.items()))


class _Document:
    """What a run has found so far, and the files that hold it.

    Attributes:
        machine: what the figures depend on.
        figures: those that are known.
        missing: suites that are not finished.
    """

    def __init__(self, options: argparse.Namespace, notes: list[str]) -> None:
        self.machine = machine.describe(options.threads)
        self.figures: list[Figure] = []
        self.missing: list[str] = list(options.suites)
        self._options = options
        self._notes = notes

    def write(self) -> None:
        """Write the files that were asked for."""
        options = self._options
        settings = {"rounds": options.rounds, "round_s": options.round_s, "threads": options.threads}
        if options.markdown:
            text = report.markdown(self.machine, self._notes, self.figures, self.missing)
            options.markdown.write_text(text, encoding="utf-8")
        if options.json:
            text = report.as_json(self.machine, settings, self._notes, self.figures, self.missing)
            options.json.write_text(text, encoding="utf-8")

    def plot(self) -> None:
        """Draw the pictures that were asked for."""
        if self._options.plots:
            try:
                plots.write(self.figures, self._options.plots)
            except ImportError as error:
                print(f"no plots: {error}", file=sys.stderr)


class _Progress:
    """Says what begins, and how long the run takes so far."""

    def __init__(self) -> None:
        self._start = wall_s()

    def __call__(self, what: str) -> None:
        minutes, seconds = divmod(int(wall_s() - self._start), 60)
        print(f"{minutes:3d}:{seconds:02d} {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _kept(directory: Path | None) -> Iterator[Path]:
    """Yield a directory for artefacts; a temporary one is removed."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="aotexport-benchmarks-") as temporary:
        yield Path(temporary)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures loaded bundles against eager execution and peers, alternating, in one run.\n\n"
        + _lists(),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", dest="suites", **_names(SUITES), help="what to measure [default: all]")
    models = f"which models [default: {','.join(MAIN_MODELS)}; some suites take fewer]"
    parser.add_argument("--models", **{**_names(MODELS), "default": None}, help=models)
    parser.add_argument("--systems", **_names(SYSTEMS), help="ways to run them [default: all]; ratios need eager")
    parser.add_argument(
        "--rounds",
        type=_positive(int),
        default=9,
        help="samples per figure [default: 9]; suites whose samples take seconds take fewer",
    )
    parser.add_argument(
        "--round-seconds",
        dest="round_s",
        type=_positive(float),
        default=0.1,
        metavar="S",
        help="length of a round of steps [default: 0.1]",
    )
    parser.add_argument("--threads", type=_positive(int), default=2, help="threads of torch, everywhere [default: 2]")
    parser.add_argument(
        "--scale-steps",
        type=_positive(int),
        default=3,
        metavar="N",
        help="sizes in the suite scale; 4: up to 100,000 nodes and 4 GiB [default: 3: 10,000 nodes, 1 GiB]",
    )
    parser.add_argument(
        "--limit",
        dest="limit_s",
        type=_positive(float),
        default=300.0,
        metavar="S",
        help="longest that a process may take to prepare, to start or to run a round [default: 300]",
    )
    parser.add_argument(
        "--minutes",
        type=_positive(float),
        default=35.0,
        help="longest that the run may take; what is not measured by then says so [default: 35]",
    )
    parser.add_argument(
        "--artefacts",
        type=Path,
        metavar="DIR",
        help="keep what systems prepare, and use what an earlier run of the same code has left there",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write pictures (PNG); needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    return parser


def _lists() -> str:
    groups = {"suites": SUITES.values(), "models": MODELS.values(), "systems": SYSTEMS.values()}
    lines: list[str] = []
    for title, entries in groups.items():
        lines += [f"{title}:", *(f"  {entry.name:<13} {entry.summary}" for entry in entries), ""]
    return "\n".join(lines)


def _names(known: Iterable[str]) -> dict[str, object]:
    """Return the settings of an option that takes some of the known names, separated by commas."""
    all_names = tuple(known)

    def parse(value: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name for name in value.split(",") if name))
        unknown = [name for name in names if name not in all_names]
        if unknown or not names:
            wrong = f"unknown: {', '.join(unknown)}" if unknown else "nothing chosen"
            raise argparse.ArgumentTypeError(f"{wrong}; there are {', '.join(all_names)}")
        return names

    return {"type": parse, "default": all_names, "metavar": "A,B"}


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(value: str) -> float:
        number = kind(value)
        if not number > 0:
            raise ValueError
        return number

    parse.__name__ = "positive number"
    return parse
