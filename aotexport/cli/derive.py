"""`aotexport derive base/ -o tuned/`: make a bundle of a bundle."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click
from rich.console import Console

from aotexport.cli.output import print_json, stdout
from aotexport.cli.progress import Progress
from aotexport.verify.fresh import FreshProcess

_EXAMPLE = """\b
Example: the encoder takes no gradients anymore, and needs no memory for them.
  aotexport derive base/ -o tuned/ --freeze 'encoder.*'
"""


@click.command(short_help="Make a bundle of a bundle, without the model's code.", epilog=_EXAMPLE)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="BUNDLE", help="Directory to write."
)
@click.option(
    "--freeze", multiple=True, metavar="PATTERN", help="Parameters that take no gradient, by name; repeatable."
)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="NAME",
    help="Program to capture: one of the bundle's, or train, infer, eval-joint; repeatable. [default: the bundle's]",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("portable",),
    show_default=True,
    metavar="NAME",
    help="Form to ship, as of an export: portable, cpu, cpu:v3,v4, cuda, cuda:sm_80,sm_90; repeatable.",
)
@click.option("--force", is_flag=True, help="Replace a bundle at the output.")
@click.option("--fast", is_flag=True, help="Compare in fewer calls; the manifest says so.")
@click.option("--no-verify", is_flag=True, help="Do not compare the new bundle with the old one's forward graphs.")
@click.option("--strip", is_flag=True, help="Leave source lines and module paths out.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors, and warnings about the bundle, alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def derive(
    bundle: Path,
    output: Path,
    freeze: tuple[str, ...],
    programs: tuple[str, ...],
    targets: tuple[str, ...],
    force: bool,
    fast: bool,
    no_verify: bool,
    strip: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Make a bundle of BUNDLE: with other frozen weights, programs or targets; the model's code is not needed.

    Its forward graphs are captured again, with its recorded calls as examples, and the new bundle is verified against
    them. `aotexport inspect` shows which bundle a bundle was made of, and what was changed.
    """
    if fast and no_verify:
        raise click.UsageError("--fast and --no-verify exclude each other; give one")
    verifying = contextlib.nullcontext() if no_verify else FreshProcess()
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with elsewhere, verifying as fresh, Progress(quiet=quiet) as progress:
        progress("import torch")
        from aotexport.cli.summary import print_summary, print_warnings, summarize
        from aotexport.pipeline.derive import derive_as
        from aotexport.pipeline.options import ExportOptions

        options = ExportOptions.checked(
            output=output,
            label_free=False,
            targets=targets,
            verify=False if no_verify else "fast" if fast else True,
            force=force,
            strip=strip,
            progress=progress,
        )
        progress(f"load {bundle}")
        report = derive_as(bundle, options, freeze=freeze, programs=programs or None, fresh=fresh)
    summary = summarize(report, progress.seconds, verified=not no_verify)
    if as_json:
        print_json(summary)
    elif quiet:
        print_warnings(Console(stderr=True, highlight=False, markup=False), summary)
    else:
        print_summary(stdout(), summary)
