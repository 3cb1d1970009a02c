"""`aotexport onnx bundle/`: add ONNX models to a bundle; and the options that an export shares with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotexport.cli.output import stdout
from aotexport.cli.progress import Progress
from aotexport.errors import ModelFileInvalid
from aotexport_runtime.cli.output import BUNDLE, print_json, printed_elsewhere
from aotexport_runtime.errors import printable
from aotexport_runtime.values.arguments import imported

if TYPE_CHECKING:
    from aotexport.lower.targets import OnnxOptions

_EXAMPLE = """\b
Example:
  aotexport onnx bundle/
"""


_OPTIONS = (
    click.option("--opset", type=int, metavar="N", help="Operator set of ONNX models.  [default: 20]"),
    click.option(
        "--onnx-state",
        "state",
        type=click.Choice(("refuse", "outputs")),
        help="Programs that change state or return views: refused, or with new values as further outputs.",
    ),
    click.option(
        "--onnx-translations",
        "translations",
        metavar="FILE.py:NAME",
        help="Dict of ONNX Script functions by the operator of torch that they stand for.",
    ),
)


def onnx_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options about ONNX models: `opset`, `state` and `translations`."""
    for option in _OPTIONS:
        command = option(command)
    return command


def read_options(given: Mapping[str, Any], programs: tuple[str, ...] = ()) -> OnnxOptions:
    """Return what a command was given for `onnx_options`."""
    from aotexport.lower.targets import OnnxOptions

    chosen = {name: value for name, value in given.items() if value is not None}
    if where := chosen.get("translations"):
        chosen["translations"] = _read_translations(where)
    return OnnxOptions(**chosen, programs=programs)


def _read_translations(where: str) -> Mapping[Any, Any]:
    from aotexport.model.model_file import open_model_file

    file = open_model_file(where)
    found = getattr(file.module, file.attribute, None)
    if not isinstance(found, Mapping):
        raise ModelFileInvalid(f"`{where}` is no dict of ONNX Script functions by operator of torch")
    return found


@click.command(short_help="Add ONNX models to a bundle.", epilog=_EXAMPLE)
@BUNDLE
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="NAME",
    help="Program to translate; repeatable. [default: all that record no gradients]",
)
@onnx_options
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Module that registers custom operators.")
@click.option("--no-verify", is_flag=True, help="Do not compare the models with eager execution.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparisons as JSON.")
def onnx(
    bundle: Path, programs: tuple[str, ...], imports: tuple[str, ...], no_verify: bool, as_json: bool, **given: Any
) -> None:
    """Add ONNX models to BUNDLE, from its forward graphs; the model's code is not needed.

    Their weights are those of the bundle, stored once. ONNX Runtime is compared with the recorded calls, which have
    other sizes too where sizes are dynamic.
    """
    with printed_elsewhere(as_json), Progress() as progress:
        progress("import torch")
        from aotexport.pipeline.onnx import export_onnx

        for name in imports:
            imported(name)
        options = read_options(given, programs)
        manifest, comparisons = export_onnx(bundle, options, verify=not no_verify, progress=progress)
    from aotexport.verify.report import largest_errors, verification_table

    errors = largest_errors(comparisons)
    if as_json:
        print_json({"models": [{"program": m.program, "file": m.file} for m in manifest.onnx], "verification": errors})
        return
    console = stdout()
    nbytes = {entry.path: entry.nbytes for entry in manifest.files}
    for model in manifest.onnx:
        where = printable(f"{bundle / model.file}: program {model.program}, operator set {model.opset}")
        console.print(f"{where}, {nbytes[model.file]:,} bytes", soft_wrap=True)
    console.print(verification_table(errors) if errors else "not verified (--no-verify)")
