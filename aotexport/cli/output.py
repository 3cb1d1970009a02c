"""What commands share: standard output, and the options and summary of a written bundle."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from aotexport.cli.progress import Progress
from aotexport.verify.fresh import FreshProcess
from aotexport_runtime.cli.output import print_json, printed_elsewhere

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The values of `--dtype`."""

_PIPED_WIDTH = 200


def stdout() -> Console:
    """Return a console on standard output; into a pipe it writes long lines instead of cutting them."""
    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if terminal else _PIPED_WIDTH, highlight=False, markup=False)


def _option(*flags: str, **others: Any) -> Any:
    """Return a field with its option: the flags, and keywords of `click.option`."""
    return field(metadata={"flags": flags, "others": others})


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What a command that writes a bundle was given; each field has its option."""

    output: Path = _option(  # noqa: RUF009 - a field
        "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="BUNDLE", help="Directory to write."
    )
    targets: tuple[str, ...] = _option(
        "--target",
        multiple=True,
        default=("portable",),
        show_default=True,
        metavar="NAME",
        help="Form to ship: portable, cpu (this machine's), cpu:v3,v4, cuda, cuda:sm_80,sm_90; repeatable.",
    )
    step: str | None = _option(
        "--step",
        metavar="OPTIMIZER",
        help="Add the program `step`, a whole training step: adamw, another of torch.optim, or package.module:Class, "
        "with options, as 'sgd:momentum=0.9', 'adamw:weight_decay=0.1,clip=True,accumulate=True'.",
    )
    force: bool = _option("--force", is_flag=True, help="Replace a bundle at the output.")
    fast: bool = _option("--fast", is_flag=True, help="Compare with eager in fewer calls; the manifest says so.")
    no_verify: bool = _option(
        "--no-verify",
        is_flag=True,
        help="Do not compare the bundle with eager execution: graphs that differ from it are not left out.",
    )
    strip: bool = _option("--strip", is_flag=True, help="Leave source lines and module paths out.")
    quiet: bool = _option("-q", "--quiet", is_flag=True, help="Print errors, and warnings about the bundle, alone.")
    as_json: bool = _option("--json", is_flag=True, help="Print the summary as JSON.")

    def keywords(self, verification: str | None = None) -> dict[str, Any]:
        """Return the keywords of `ExportOptions` that the options say; `verification` is of `--verify`."""
        if (verification is not None) + self.fast + self.no_verify > 1:
            first = "" if verification is None else "--verify, "
            raise click.UsageError(f"{first}--fast and --no-verify exclude each other; give one")
        verify = "fast" if self.fast else not self.no_verify
        if verification not in (None, "standard"):
            verify = verification
        return {
            "output": self.output,
            "targets": self.targets,
            "verify": verify,
            "force": self.force,
            "strip": self.strip,
            "step": self.step,
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[Progress, FreshProcess | None]]:
        """Yield the progress and the process that verifies, which imports torch while this process does."""
        verifying = contextlib.nullcontext() if self.no_verify else FreshProcess()
        with printed_elsewhere(self.as_json), verifying as fresh, Progress(quiet=self.quiet) as progress:
            progress("import torch")
            yield progress, fresh

    def show(self, summary: Mapping[str, Any], progress: Progress) -> None:
        """Print the summary of a finished export; see `summarize`."""
        from aotexport.verify.report import of_command, print_summary, print_warnings

        summary = of_command(summary, self.output, progress.seconds, progress.own_nbytes)
        if self.as_json:
            print_json(summary)
        elif self.quiet:
            print_warnings(Console(stderr=True, highlight=False, markup=False), summary)
        else:
            print_summary(stdout(), summary)


def write_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `WriteOptions`, as its argument `write`."""

    @functools.wraps(command)
    def collected(**given: Any) -> None:
        write = WriteOptions(**{each.name: given.pop(each.name) for each in fields(WriteOptions)})
        command(write=write, **given)

    for each in reversed(fields(WriteOptions)):
        collected = click.option(*each.metadata["flags"], each.name, **each.metadata["others"])(collected)
    return collected
