"""`aotexport bom bundle/`: write a bundle's bill of materials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import click

from aotexport.inspection.bom import bill_of_materials
from aotexport_runtime.bundle.read import open_bundle

_EXAMPLE = """\b
Example:
  aotexport bom bundle/ -o bundle.cdx.json
"""


@click.command(short_help="Write a bundle's bill of materials.", epilog=_EXAMPLE)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.File("w", atomic=True), default="-", help="File to write (default: print).")
def bom(bundle: Path, output: IO[str]) -> None:
    """Write what BUNDLE is made of as CycloneDX 1.6 (JSON): files with digests, operators, packages, parents.

    Every file is compared with its digest. Nothing of the bundle is run, and torch is not needed.
    """
    output.write(json.dumps(bill_of_materials(open_bundle(bundle)), indent=2) + "\n")
