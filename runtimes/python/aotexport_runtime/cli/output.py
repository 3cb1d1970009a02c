"""What commands share: arguments, options, files and text."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from aotexport_runtime.errors import printable

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
BUNDLE = click.argument("bundle", type=DIRECTORY)
_CUSTOM = (
    click.option("--import", "imports", multiple=True, metavar="MODULE",
                 help="Module that registers custom operators."),
    click.option("--operator-namespace", "namespaces", multiple=True, metavar="NAME",
                 help="Namespace of custom operators that the bundle may call."),
    click.option("--tensor-type", "types", multiple=True, metavar="MODULE:NAME",
                 help="Class of tensors that the bundle may make."),
)  # fmt: skip


class _TextFile(click.File):
    """A file of text that is exchanged in one step; a place that cannot have one is refused before the work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        place = Path(value)
        if value != "-" and (place.is_dir() or not os.access(place.parent, os.W_OK)):
            reason = (
                "is a directory" if place.is_dir() else f"is in `{place.parent}`, which is none that you may write to"
            )
            self.fail(f"`{place}` {reason}; choose another place", param, ctx)
        return super().convert(value, param, ctx)


TEXT_FILE = _TextFile("w", encoding="utf-8", atomic=True)


def custom_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for bundles with custom operators: `imports`, `namespaces`, `types`."""
    return functools.reduce(lambda made, option: option(made), reversed(_CUSTOM), command)


def printed_elsewhere(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """Send what models print to standard error, where standard output is for a document alone."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def print_json(document: Any) -> None:
    """Print one JSON document; numbers that are not finite become null."""
    click.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=str)))


def begin(stage: str, *, quiet: bool = False) -> None:
    """Tell of a stage of a command as it begins."""
    if not quiet:
        click.echo(printable(stage), err=True)


def columns(rows: Iterable[Sequence[str]], aligned: Callable[[str, int], str] = str.ljust) -> Iterator[str]:
    """Yield rows of text as lines, their cells below one another."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    yield from ("  ".join(map(aligned, row, widths)).rstrip() for row in cells)


def write(output: IO[str], text: str, what: str) -> None:
    """Write a text to a file, and say where it is."""
    output.write(text)
    click.echo(printable(f"{what}: {output.name}"), err=output.name == "<stdout>")
