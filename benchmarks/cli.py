"""The command line."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import machine, plots, report
from benchmarks.artefacts import Artefacts
from benchmarks.figures import Figure
from benchmarks.models import MODELS
from benchmarks.run import Run
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
    described = machine.describe(options.threads)
    with tempfile.TemporaryDirectory(prefix="aotexport-benchmarks-") as directory:
        artefacts = Artefacts(Path(directory), options.threads, _progress)
        run = Run(
            model_names=options.models,
            system_names=options.systems,
            rounds=options.rounds,
            round_s=options.round_s,
            threads=options.threads,
            artefacts=artefacts,
            progress=_progress,
            scale_steps=options.scale_steps,
        )
        try:
            figures = _measure(run, options.suites)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    _write(options, described, artefacts.notes, figures)
    return 0


def _measure(run: Run, suites: Iterable[str]) -> list[Figure]:
    figures: list[Figure] = []
    for name in suites:
        own = list(SUITES[name].figures(run))
        figures += own
        if own:
            print(report.text(SUITES[name], own), end="\n\n", flush=True)
    for note in run.artefacts.notes:
        print(f"note: {note}")
    return figures


def _write(options: argparse.Namespace, described: dict[str, str], notes: list[str], figures: list[Figure]) -> None:
    print(", ".join(f"{name}: {value}" for name, value in described.items()))
    settings = {"rounds": options.rounds, "round_s": options.round_s, "threads": options.threads}
    if options.plots:
        _plot(figures, options.plots)
    if options.markdown:
        options.markdown.write_text(report.markdown(described, notes, figures), encoding="utf-8")
    if options.json:
        options.json.write_text(report.as_json(described, settings, notes, figures), encoding="utf-8")


def _plot(figures: list[Figure], directory: Path) -> None:
    try:
        plots.write(figures, directory)
    except ImportError as error:
        print(f"no plots: {error}", file=sys.stderr)


def _progress(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    runnable = [system.name for system in SYSTEMS.values() if system.load is not None]
    chosen = [model.name for model in MODELS.values() if not model.only_in]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures loaded bundles against eager execution and peers, alternating, in one run.\n\n"
        + _lists(),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", dest="suites", **_names(SUITES), help="what to measure [default: all]")
    parser.add_argument("--models", **_names(chosen), help="which models, where a suite has no own [default: all]")
    parser.add_argument("--systems", **_names(runnable), help="ways to run them [default: all]; ratios need eager")
    parser.add_argument(
        "--rounds",
        type=_positive(int),
        default=9,
        help="samples per figure [default: 9]; suites whose samples take seconds take at most 3 or 5",
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
        default=4,
        metavar="N",
        help="sizes in the suite scale, from the smallest on [default: 4: 100,000 nodes, 4 GiB]",
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
