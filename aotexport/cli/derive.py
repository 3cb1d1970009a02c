"""`aotexport derive base/ -o tuned/`: make a bundle of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotexport.cli.output import DTYPES, WriteOptions, write_options
from aotexport_runtime.cli.output import BUNDLE, DIRECTORY

_EXAMPLE = """\b
Example: the encoder takes no gradients anymore, and needs no memory for them.
  aotexport derive base/ -o tuned/ --freeze 'encoder.*'
"""


@click.command(short_help="Make a bundle of a bundle, without the model's code.", epilog=_EXAMPLE)
@BUNDLE
@write_options
@click.option(
    "--freeze", multiple=True, metavar="PATTERN", help="Parameters that take no gradient, by name; repeatable."
)
@click.option(
    "--lora",
    type=DIRECTORY,
    metavar="ADAPTER",
    help="Adapter of BUNDLE, in peft's files, to have in the new bundle beside frozen weights.",
)
@click.option("--merge", is_flag=True, help="Write the adapter of --lora into the weights.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast floating weights and recorded inputs first.")
@click.option(
    "--dynamic",
    multiple=True,
    metavar="SIZE",
    help="A narrower range of a dynamic size, or one name for sizes that are equal, as 'x:0=batch[1:64]'; repeatable.",
)
@click.option(
    "--resize-embeddings",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens that a language model of a recipe shall read and score; new rows are drawn about the others' mean.",
)
@click.option(
    "--quantize",
    type=click.Choice(("int4", "int8")),
    help="Linear layers compute their weights of integers, for --lora.",
)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="NAME",
    help="Program to capture: one of the bundle's, or train, infer, eval-joint; repeatable. [default: the bundle's]",
)
def derive(bundle: Path, write: WriteOptions, dtype: str | None, programs: tuple[str, ...], **changes: Any) -> None:
    """Make a bundle of BUNDLE: with an adapter, frozen weights, more tokens, another dtype, narrower sizes, targets.

    No model code is needed: the forward graphs are captured again, with the recorded calls as examples, and the new
    bundle is verified against them. `aotexport inspect` shows which bundle a bundle was made of, and what was changed.
    """
    given = write.keywords()
    with write.running() as (progress, fresh):
        import torch

        from aotexport.pipeline.derive import derive_as
        from aotexport.pipeline.options import DeriveOptions
        from aotexport.verify.report import summarize

        narrow = None if dtype is None else getattr(torch, dtype)
        options = DeriveOptions(**given, **changes, dtype=narrow, programs=programs or None, progress=progress)
        progress(f"load {bundle}")
        report = derive_as(bundle, options, fresh)
    write.show(summarize(report, verified=not write.no_verify), progress)
