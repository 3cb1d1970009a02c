"""`inspect`, `check`, `diff`, `view`, `bom`, `doctor`, `explain`: what bundles are, and what a machine has for them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.cli.output import BUNDLE, DIRECTORY, TEXT_FILE, columns, print_json, write
from aotexport_runtime.commands.doctor import machine, of_bundle
from aotexport_runtime.commands.explain import explain
from aotexport_runtime.errors import NotSupported, printable
from aotexport_runtime.inspection.diff import BundleDifference, diff_bundles
from aotexport_runtime.inspection.kernels import KernelFacts, kernel_facts
from aotexport_runtime.inspection.view import dot_of, graphs_of
from aotexport_runtime.module.describe import describe, summary

_EXAMPLE = """\b
Examples:
  aotexport inspect bundle/ --program train --graph
  aotexport diff bundle/ tuned/
  aotexport view bundle/ --format dot --depth 3
  aotexport bom bundle/ -o bundle.cdx.json
  aotexport doctor bundle/
  aotexport explain file-differs
"""

_VIEWERS = {"model-explorer": "graphs.json", "netron": "graphs.dot", "dot": "graphs.dot"}
"""By viewer the file that is written by default."""


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
        click.echo(printable(describe(opened, program=program, graph=graph)))


def _show_kernels(bundle: Bundle, program: str | None, *, as_json: bool) -> None:
    facts = kernel_facts(bundle, program)
    if as_json:
        print_json([dataclasses.asdict(kernel) for kernel in facts])
        return
    for line in itertools.chain.from_iterable(map(_described, facts)) if facts else ["no kernels"]:
        click.echo(line)


def _described(kernel: KernelFacts) -> Iterator[str]:
    yield printable(kernel.name)
    rows = {
        "operators": ", ".join(name.removeprefix("aten::") for name in kernel.operators) or "not recorded",
        "lines": ", ".join(kernel.lines) or "not recorded",
        "launches": ", ".join(f"{count} in {part}" for part, count in kernel.launches.items()),
        "candidates": str(kernel.candidates),
    }
    code: list[tuple[str, ...]] = [("code", "bytes", "registers", "stack", "shared")]
    for each in kernel.code:
        taken = each.resources
        known = ("", "") if taken is None else (f"{taken.registers}", f"{taken.stack_nbytes:,}")
        code.append((each.architecture, f"{each.nbytes:,}", *known, f"{each.shared_nbytes:,}"))
    yield from (f"  {line}" for line in (*columns(rows.items()), *columns(code)))


@click.command(short_help="List every fault of a bundle.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the faults as JSON.")
@click.pass_context
def check(context: click.Context, bundle: Path, as_json: bool) -> None:
    """List every fault of BUNDLE, with its code and JSON path; nothing is run, and torch is not needed.

    The exit code is 1 where there is any.
    """
    faults = faults_of(bundle)
    if as_json:
        fields = ("code", "where", "path", "reason")
        print_json([{name: getattr(fault, name) for name in fields} for fault in faults])
    else:
        for fault in faults:
            click.echo(printable(f"{fault.where or bundle} {fault.path}: {fault.reason} [{fault.code}]"))
        click.echo(f"{bundle}: {'valid' if not faults else '1 fault' if len(faults) == 1 else f'{len(faults)} faults'}")
    context.exit(1 if faults else 0)


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
    if not changes:
        click.echo("the bundles are the same")
    for section, items in itertools.groupby(changes, key=lambda change: change.section):
        click.secho(printable(section), bold=True)
        for line in columns([(change.name, _what(change)) for change in items]):
            click.echo(f"  {line}")


def _what(change: BundleDifference) -> str:
    if change.max_abs is not None:
        return f"{change.after}: {change.unequal:,} elements differ, by at most {change.max_abs:.3g}"
    return f"{change.before or 'absent'} -> {change.after or 'absent'}"


@click.command(short_help="Write a bundle's graphs for a viewer.", epilog=_EXAMPLE)
@BUNDLE
@click.option("--format", "viewer", type=click.Choice(_VIEWERS), default="model-explorer", show_default=True,
              help="Viewer; of netron and dot (Graphviz) the forward graph of one program.")  # fmt: skip
@click.option(
    "-o", "--output", type=TEXT_FILE, metavar="FILE", help="File to write.  [default: graphs.json, graphs.dot]"
)
@click.option("--program", metavar="NAME", help="Write the graphs of one program.")
@click.option(
    "--depth", type=click.IntRange(min=1), metavar="N", help="Of netron and dot: draw modules this deep as one."
)
@click.pass_context
def view(
    context: click.Context, bundle: Path, viewer: str, output: IO[str] | None, program: str | None, depth: int | None
) -> None:
    """Write the graphs of BUNDLE for a viewer: Model Explorer has modules as layers that open, and backward as one.

    `pip install ai-edge-model-explorer` brings the command `model-explorer FILE`, `pip install netron` the command
    `netron FILE`, which shows ONNX models (`aotexport onnx`) as well. Nothing of the bundle is run, and torch is not
    needed.
    """
    if depth is not None and viewer == "model-explorer":
        raise click.UsageError("--depth is for --format netron and dot; layers of Model Explorer open by a click")
    opened = open_bundle(bundle)
    names = [program] if program else list(opened.program_names)
    if viewer == "model-explorer":
        text = json.dumps(graphs_of(opened, names))
    else:
        text = dot_of(opened, "infer" if "infer" in names else names[0], depth)
    file = output or TEXT_FILE.convert(_VIEWERS[viewer], None, context)
    write(file, text, "graphs")


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
            f"bills of materials need the packages of the extra `bom` ({error}): pip install 'aotexport-runtime[bom]'"
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
    lines, is_loaded = ([], True) if bundle is None else of_bundle(bundle)
    click.echo(printable("\n".join([*machine(), *lines])))
    context.exit(0 if is_loaded else 1)
