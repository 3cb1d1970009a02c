"""`aotexport push bundle/ hf://...` and `aotexport pull hf://... -o bundle/`: bundles in repositories of the Hub."""

from __future__ import annotations

from pathlib import Path

import click

from aotexport.cli.output import BUNDLE
from aotexport.cli.progress import Progress
from aotexport_runtime.errors import printable

_EXAMPLE = """\b
Examples:
  aotexport push bundle/ hf://me/digits --licence apache-2.0
  aotexport pull hf://me/digits -o digits/
"""


@click.command(short_help="Write a bundle to a repository of the Hugging Face Hub.", epilog=_EXAMPLE)
@BUNDLE
@click.argument("address", metavar="hf://OWNER/NAME[@BRANCH]")
@click.option("--licence", metavar="ID", help="Licence for the model card, as the Hub names it: apache-2.0.")
@click.option("--private", is_flag=True, help="Make a private repository, if there is none.")
def push(bundle: Path, address: str, licence: str | None, private: bool) -> None:
    """Write BUNDLE to a repository of the Hub in one commit, with a model card; `hf auth login` first.

    The bundle is its folder `bundle`. Files beside it stay, and what you write into the card, too.
    """
    from aotexport_runtime.commands import hub

    with Progress() as progress:
        progress(f"write to {address}")
        commit = hub.push(bundle, address, licence=licence, private=private)
    click.echo(printable(f"{address}: {commit}"))


@click.command(short_help="Take a bundle from a repository of the Hugging Face Hub.", epilog=_EXAMPLE)
@click.argument("address", metavar="hf://OWNER/NAME[@REVISION]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="BUNDLE",
              help="Directory to write.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a bundle at the output.")
def pull(address: str, output: Path, force: bool) -> None:
    """Write the bundle of a repository to a directory: the files that it lists, no others, all checked first."""
    from aotexport_runtime.commands import hub

    with Progress() as progress:
        progress(f"read {address}")
        hub.pull(address, output, force=force)
    click.echo(printable(f"{output}: a bundle, and valid"))
