"""`aotexport inspect bundle/`: show what a bundle is."""

from __future__ import annotations

from pathlib import Path

import click

from aotexport.cli.output import print_json, stdout
from aotexport.inspection.inspect import render
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.commands.describe import summary

_EXAMPLE = """\b
Example:
  aotexport inspect bundle/ --program train --graph
"""


@click.command(short_help="Show what a bundle is.", epilog=_EXAMPLE)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--program", metavar="NAME", help="Show one program.")
@click.option("--graph", is_flag=True, help="Show the graphs, one line per operator call.")
@click.option("--files", is_flag=True, help="Show the files, with their sizes and digests.")
@click.option("--kernels", is_flag=True, help="Show the kernels of target cuda: what they fuse, launches, resources.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def inspect(bundle: Path, program: str | None, graph: bool, files: bool, kernels: bool, as_json: bool) -> None:
    """Show what BUNDLE is: programs, inputs, outputs with what they alias, changes, graphs, sizes.

    Every file is compared with its digest. Nothing of the bundle is run, and torch is not needed.
    """
    opened = open_bundle(bundle)
    if kernels:
        _show_kernels(opened, program, as_json=as_json)
        return
    if as_json:
        print_json(summary(opened, program=program, graph=graph))
        return
    console = stdout()
    for piece in render(opened, program=program, graph=graph, files=files):
        console.print(piece, soft_wrap=not console.is_terminal)


def _show_kernels(bundle: Bundle, program: str | None, *, as_json: bool) -> None:
    from aotexport.inspection import kernels

    facts = kernels.kernel_facts(bundle, program)
    if as_json:
        print_json(kernels.as_json(facts))
        return
    console = stdout()
    for piece in kernels.render(facts):
        console.print(piece, soft_wrap=not console.is_terminal)
