"""`report` and `profile`: memory and time of a bundle's programs."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import click

from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.cli.output import BUNDLE, DIRECTORY, TEXT_FILE, begin, columns, custom_options, print_json, write
from aotexport_runtime.errors import printable

_EXAMPLE = """\b
Examples:
  aotexport report bundle/ -o report.html --size batch=32
  aotexport report tuned/ -o report.html --against bundle/
  aotexport profile bundle/ --program train -o trace.json
"""


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
    begin("import torch")
    from aotexport_runtime.inspection.recorded import portable
    from aotexport_runtime.inspection.report import report as page

    opened = open_bundle(bundle)
    other = None if against is None else open_bundle(against)
    text = page(opened, portable(**custom), sizes=sizes, against=other, timed=not no_measure, progress=begin)
    write(output, text, "report")


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
    begin("import torch")
    from aotexport_runtime.execution.source import line_of
    from aotexport_runtime.inspection import timing
    from aotexport_runtime.inspection.recorded import portable

    opened = open_bundle(bundle)
    begin("run the recorded call")
    name, times = timing.profile(opened, portable(**custom), program, output)
    seconds = {
        "lines": times.by(line_of),
        "operators": times.by(lambda node: node.op),
        "modules": times.by(lambda node: node.module),
    }
    if as_json:
        print_json({"program": name, "seconds": times.total, **seconds})
        return
    click.secho(printable(f"{name}: {1e3 * times.total:.3g} ms a call"), bold=True)
    for title, rows in seconds.items():
        whole = sum(rows.values())
        shown = [(key or "(the whole)", f"{1e3 * s:.3g}", f"{s / whole:.1%}") for key, s in [*rows.items()][:10]]
        click.echo("\n".join(columns([(title, "ms", "share"), *shown])))
    if output is not None:
        click.echo(printable(f"trace: {output.name}"))
