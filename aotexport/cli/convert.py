"""`aotexport convert bundle/ model.pt2`: a file of `torch.export` of a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from aotexport.cli.progress import Progress
from aotexport_runtime.cli.output import BUNDLE
from aotexport_runtime.errors import printable
from aotexport_runtime.values.arguments import imported

_EXAMPLE = """\b
Example: a file that AOTInductor and ExecuTorch compile
  aotexport convert bundle/ model.pt2
"""


@click.command(short_help="Write a bundle's forward graph as a file of torch.export.", epilog=_EXAMPLE)
@BUNDLE
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--program", metavar="NAME", help="Program to write, which has one mode.  [default: infer]")
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Module that registers custom operators.")
@click.option("--force", is_flag=True, help="Replace a file at OUTPUT.")
def convert(bundle: Path, output: Path, program: str | None, imports: tuple[str, ...], force: bool) -> None:
    """Write a program of BUNDLE to OUTPUT (`.pt2`) as `torch.export.save` does, for what takes such files.

    It has the original names of parameters and buffers and the program's dynamic sizes, loads with torch alone, and is
    compared with the bundle in its recorded calls.
    """
    with Progress() as progress:
        progress("import torch")
        import aotexport

        for name in imports:
            imported(name)
        progress("export, and compare with the bundle")
        exported = aotexport.convert(bundle, output, program=program, force=force)
    click.echo(printable(f"{output}: {output.stat().st_size:,} bytes, {len(exported.graph.nodes)} nodes"))
