"""`aotexport inspect bundle/`, `aotexport diff a/ b/` and `aotexport bom bundle/`: show what bundles are."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import aotexport
from aotexport.cli.output import BUNDLE, DIRECTORY, TEXT_FILE, print_json, stdout
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.commands.doctor import machine, of_bundle
from aotexport_runtime.commands.explain import explain
from aotexport_runtime.errors import NotSupported, printable
from aotexport_runtime.inspection.diff import BundleDifference, diff_bundles
from aotexport_runtime.inspection.kernels import KernelFacts, kernel_facts
from aotexport_runtime.module.describe import describe, summary

_EXAMPLE = """\b
Examples:
  aotexport inspect bundle/ --program train --graph
  aotexport diff bundle/ tuned/
  aotexport bom bundle/ -o bundle.cdx.json
  aotexport doctor bundle/
  aotexport explain file-differs
"""


@click.command(short_help="Show what a bundle is.", epilog=_EXAMPLE)
@BUNDLE
@click.option("--program", metavar="NAME", help="Show one program.")
@click.option("--graph", is_flag=True, help="Show the graphs, one line per operator call.")
@click.option("--kernels", is_flag=True, help="Show the kernels of target cuda: what they fuse, launches, resources.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def inspect(bundle: Path, program: str | None, graph: bool, kernels: bool, as_json: bool) -> None:
    """Show what BUNDLE is: programs, inputs, outputs with what they alias, changes, graphs, files.

    Every file is compared with its digest. Nothing of the bundle is run, and torch is not needed.
    """
    opened = open_bundle(bundle)
    if kernels:
        _show_kernels(opened, program, as_json=as_json)
    elif as_json:
        print_json(summary(opened, program=program, graph=graph))
    else:
        click.echo(describe(opened, program=program, graph=graph))


def _show_kernels(bundle: Bundle, program: str | None, *, as_json: bool) -> None:
    facts = kernel_facts(bundle, program)
    if as_json:
        print_json([dataclasses.asdict(kernel) for kernel in facts])
        return
    console = stdout()
    for piece in _rendered(facts):
        console.print(piece, soft_wrap=not console.is_terminal)


def _rendered(facts: list[KernelFacts]) -> Iterator[RenderableType]:
    if not facts:
        yield Text("no kernels")
    for kernel in facts:
        yield Text(printable(kernel.name), style="bold")
        launches = ", ".join(f"{count} in {part}" for part, count in kernel.launches.items())
        grid = Table.grid(padding=(0, 2))
        rows = {
            "operators": ", ".join(name.removeprefix("aten::") for name in kernel.operators) or "not recorded",
            "lines": ", ".join(kernel.lines) or "not recorded",
            "launches": launches,
            "candidates": str(kernel.candidates),
        }
        for name, value in rows.items():
            grid.add_row(name, printable(value))
        yield Padding(grid, (0, 0, 0, 2), expand=False)
        code = Table("code", "bytes", "registers", "stack", "shared", box=None, pad_edge=False)
        for column in code.columns[1:]:
            column.justify = "right"
        for each in kernel.code:
            taken = each.resources
            known = ("", "") if taken is None else (f"{taken.registers}", f"{taken.stack_nbytes:,}")
            code.add_row(each.architecture, f"{each.nbytes:,}", *known, f"{each.shared_nbytes:,}")
        yield Padding(code, (0, 0, 0, 2), expand=False)


@click.command(short_help="Show what differs between two bundles.", epilog=_EXAMPLE)
@click.argument("a", type=DIRECTORY)
@click.argument("b", type=DIRECTORY)
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
        _print_changes(changes)
    context.exit(1 if changes else 0)


def _print_changes(changes: list[BundleDifference]) -> None:
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


@click.command(short_help="Write a bundle's bill of materials.", epilog=_EXAMPLE)
@BUNDLE
@click.option("-o", "--output", type=TEXT_FILE, default="-", help="File to write (default: print).")
def bom(bundle: Path, output: IO[str]) -> None:
    """Write what BUNDLE is made of as CycloneDX 1.6 (JSON): files with digests, operators, packages, parents.

    Every file is compared with its digest. Nothing of the bundle is run, and torch is not needed.
    """
    try:
        from aotexport_runtime.inspection.bom import bill_of_materials
    except ImportError as error:
        raise NotSupported(
            f"bills of materials need the packages of the extra `bom` ({error}): pip install 'aotexport[bom]'"
        ) from None
    # The file is opened when it is first written to.
    document = json.dumps(bill_of_materials(open_bundle(bundle)), indent=2)
    output.write(document + "\n")


@click.command("explain", short_help="Explain an error: its cause, and the way out.", epilog=_EXAMPLE)
@click.argument("name", metavar="CODE")
def explain_command(name: str) -> None:
    """Explain the code that stands in brackets behind an error, or a class of errors: its cause, and the way out."""
    click.echo(explain(name))


@click.command(short_help="Say what this machine has for bundles.", epilog=_EXAMPLE)
@click.argument("bundle", type=DIRECTORY, required=False)
@click.pass_context
def doctor(context: click.Context, bundle: Path | None) -> None:
    """Say what this machine has: packages, devices, measurements; and of BUNDLE what it needs and how it would run."""
    click.echo(f"aotexport: {aotexport.__version__}")
    lines, is_loaded = ([], True) if bundle is None else of_bundle(bundle)
    click.echo(printable("\n".join([*machine(), *lines])))
    context.exit(0 if is_loaded else 1)
