"""`aotexport diff a/ b/`: show what differs between two bundles."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import click
from rich.table import Table

from aotexport.cli.output import print_json, stdout
from aotexport.inspection.diff import BundleDifference, diff_bundles
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import printable

_EXAMPLE = """\b
Example:
  aotexport diff bundle/ tuned/
"""

_BUNDLE = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(short_help="Show what differs between two bundles.", epilog=_EXAMPLE)
@click.argument("a", type=_BUNDLE)
@click.argument("b", type=_BUNDLE)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.pass_context
def diff(context: click.Context, a: Path, b: Path, as_json: bool) -> None:
    """Show what differs between the bundles A and B.

    Compared are format, programs, inputs and outputs, operators per graph, weights by name and value, and files. The
    exit code is 1 when anything differs.
    """
    changes = diff_bundles(open_bundle(a), open_bundle(b))
    if as_json:
        print_json({"differ": bool(changes), "changes": [dataclasses.asdict(change) for change in changes]})
    else:
        _print(changes)
    context.exit(1 if changes else 0)


def _print(changes: list[BundleDifference]) -> None:
    console = stdout()
    if not changes:
        console.print("the bundles are the same")
    for section, items in itertools.groupby(changes, key=lambda change: change.section):
        console.print(printable(section), style="bold")
        table = Table.grid(padding=(0, 2))
        for change in items:
            table.add_row(f"  {printable(change.name)}", printable(_what(change)))
        console.print(table)


def _what(change: BundleDifference) -> str:
    if change.max_abs is not None:
        return f"{change.after}: {change.unequal:,} elements differ, by at most {change.max_abs:.3g}"
    return f"{change.before or 'absent'} -> {change.after or 'absent'}"
