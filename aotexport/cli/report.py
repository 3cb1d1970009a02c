"""`aotexport report`, `profile` and `view`: memory, time and graphs of a bundle's programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import click
from rich.table import Table

from aotexport.cli.output import BUNDLE, DIRECTORY, TEXT_FILE, custom_options, print_json, stdout
from aotexport.cli.progress import Progress
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import printable

_EXAMPLE = """\b
Examples:
  aotexport report bundle/ -o report.html --size batch=32
  aotexport report tuned/ -o report.html --against bundle/
  aotexport profile bundle/ --program train -o trace.json
  aotexport view bundle/ -o graphs.json
  aotexport view bundle/ --format dot --depth 3
"""
_VIEWERS = {"model-explorer": "graphs.json", "netron": "graphs.dot", "dot": "graphs.dot"}
"""By viewer the file that is written by default."""


def _write(output: IO[str], text: str, what: str) -> None:
    output.write(text)
    click.echo(printable(f"{what}: {output.name}"), err=output.name == "<stdout>")


def _sizes(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in given:
        name, _, value = each.partition("=")
        if not value.isdecimal():
            raise click.BadParameter(f"`{each}` is no NAME=N, such as batch=32", context, option)
        found[name] = int(value)
    return found


@click.command(short_help="Write a page about a bundle: memory, time, weights.", epilog=_EXAMPLE)
@BUNDLE
@click.option(
    "-o", "--output", type=TEXT_FILE, default="report.html", show_default=True,
    metavar="FILE", help="File to write.",
)  # fmt: skip
@click.option("--size", "sizes", multiple=True, callback=_sizes, metavar="NAME=N",
              help="Value of a dynamic dimension for the memory; repeatable.  [default: as recorded]")  # fmt: skip
@click.option("--against", type=DIRECTORY, help="Bundle to compare with.")
@click.option("--no-measure", is_flag=True, help="Do not run the recorded calls, for time and differences from eager.")
@custom_options
def report(
    bundle: Path, output: IO[str], sizes: dict[str, int], against: Path | None, no_measure: bool, **custom: Any
) -> None:
    """Write one HTML file about BUNDLE that needs no network.

    It shows how a call runs, its memory over time by what it holds, which lines made what backward needs, time by
    operator, module and line, how far its graphs differ from eager, and the weights.
    """
    with Progress() as progress:
        progress("import torch")
        from aotexport_runtime.inspection.recorded import portable
        from aotexport_runtime.inspection.report import report as page

        opened = open_bundle(bundle)
        other = None if against is None else open_bundle(against)
        text = page(opened, portable(**custom), sizes=sizes, against=other, timed=not no_measure, progress=progress)
    _write(output, text, "report")


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
    from aotexport_runtime.inspection.view import dot_of, graphs_of

    if depth is not None and viewer == "model-explorer":
        raise click.UsageError("--depth is for --format netron and dot; layers of Model Explorer open by a click")
    opened = open_bundle(bundle)
    names = [program] if program else list(opened.program_names)
    if viewer == "model-explorer":
        text = json.dumps(graphs_of(opened, names))
    else:
        text = dot_of(opened, "infer" if "infer" in names else names[0], depth)
    file = output or TEXT_FILE.convert(_VIEWERS[viewer], None, context)
    _write(file, text, "graphs")


@click.command(short_help="Measure the lines of a bundle's model.", epilog=_EXAMPLE)
@BUNDLE
@click.option("--program", metavar="NAME", help="Program to run.  [default: the first]")
@click.option("-o", "--output", type=TEXT_FILE, metavar="FILE",
              help="Also write a trace that Perfetto shows (JSON).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the seconds by line, operator and module as JSON.")
@custom_options
def profile(bundle: Path, program: str | None, output: IO[str] | None, as_json: bool, **custom: Any) -> None:
    """Run the first recorded call of a program of BUNDLE, and show which lines of the model cost most.

    The call runs by the bundle's graphs (`target="portable"`), with its backward where the program records gradients.
    """
    with Progress() as progress:
        progress("import torch")
        from aotexport_runtime.execution.source import line_of
        from aotexport_runtime.inspection import timing
        from aotexport_runtime.inspection.recorded import portable

        opened = open_bundle(bundle)
        progress("run the recorded call")
        name, times = timing.profile(opened, portable(**custom), program, output)
    seconds = {
        "lines": times.by(line_of),
        "operators": times.by(lambda node: node.op),
        "modules": times.by(lambda node: node.module),
    }
    if as_json:
        print_json({"program": name, "seconds": times.total, **seconds})
        return
    console = stdout()
    console.print(printable(f"{name}: {1e3 * times.total:.3g} ms a call"), style="bold")
    for title, rows in seconds.items():
        table = Table(title, "ms", "share", box=None, pad_edge=False)
        whole = sum(rows.values())
        for key, value in list(rows.items())[:10]:
            table.add_row(printable(key or "(the whole)"), f"{1e3 * value:.3g}", f"{value / whole:.1%}")
        console.print(table)
    if output is not None:
        console.print(printable(f"trace: {output.name}"))
