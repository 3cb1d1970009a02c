"""`push bundle/ hf://...` and `pull hf://... -o bundle/`: bundles in repositories."""

from __future__ import annotations

from pathlib import Path

import click

from aotexport_runtime.cli.output import BUNDLE, begin
from aotexport_runtime.errors import printable

_EXAMPLE = """\b
Examples:
  aotexport push bundle/ hf://me/digits --licence apache-2.0
  aotexport pull hf://me/digits -o digits/
  aotexport push bundle/ oci:layout:v1
"""


@click.command(short_help="Write a bundle to a repository of models or containers.", epilog=_EXAMPLE)
@BUNDLE
@click.argument("address", metavar="hf://OWNER/NAME[@BRANCH]|oci:DIRECTORY[:TAG]")
@click.option("--licence", metavar="ID", help="Licence to tell: apache-2.0 (of the Hub), Apache-2.0 (of OCI).")
@click.option("--private", is_flag=True, help="Make a private repository on the Hub, if there is none.")
@click.option("--force", is_flag=True, help="Replace an OCI layout.")
def push(bundle: Path, address: str, licence: str | None, private: bool, force: bool) -> None:
    """Write BUNDLE to a repository of the Hugging Face Hub in one commit, or as an OCI layout (ModelPack).

    In a repository it is the folder `bundle`, with a model card; files beside it stay, and what you write into the
    card, too. `hf auth login` first. An OCI layout is a directory: `skopeo copy oci:DIRECTORY:TAG docker://...` and
    `oras cp --from-oci-layout` bring it to a registry, `oras pull` takes the bundle from there.
    """
    from aotexport_runtime.commands import hub, oci

    if private if address.startswith("oci:") else force:
        raise click.UsageError("--private is for hf://, and --force for oci:")
    begin(f"write to {address}")
    if address.startswith("oci:"):
        place, _, tag = address.removeprefix("oci:").partition(":")
        written = oci.write_layout(bundle, Path(place), tag=tag or "latest", licence=licence, force=force)
    else:
        written = hub.push(bundle, address, licence=licence, private=private)
    click.echo(printable(f"{address}: {written}"))


@click.command(short_help="Take a bundle from a repository of the Hugging Face Hub.", epilog=_EXAMPLE)
@click.argument("address", metavar="hf://OWNER/NAME[@REVISION]|oci:DIRECTORY[:TAG]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="BUNDLE",
              help="Directory to write.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a bundle at the output.")
def pull(address: str, output: Path, force: bool) -> None:
    """Write the bundle of a repository, or a layout, to a directory: the files that it lists, all checked first."""
    from aotexport_runtime.commands import hub

    begin(f"read {address}")
    hub.pull(address, output, force=force)
    click.echo(printable(f"{output}: a bundle, and valid"))
