"""`aotexport model.py -o bundle/`: export a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotexport.cli.onnx import onnx_options, read_options
from aotexport.cli.output import DTYPES, WriteOptions, write_options

if TYPE_CHECKING:
    from aotexport.model.programs import ModelSource
    from aotexport.pipeline.options import ExportOptions

_EXAMPLE = """\b
Example, with this model.py:
  model = Net()
  example_inputs = (torch.randn(8, 3),)
\b
  aotexport model.py -o bundle/ --dynamic 'x:0=batch[1:64]'
"""


_GROUPS = {
    "Model": "recipe weights dtype label_free keep_operators",
    "ONNX": "onnx opset onnx_state translations",
    "Comparison with eager": "verification fast no_verify allow_untested_torch",
    "Contents and debugging": "strip dump_passes",
}


class _GroupedCommand(click.Command):
    """A command with titles for some of its options; the others come first, as `Options`."""

    def __init__(self, *args: Any, groups: Mapping[str, str], **kwargs: Any) -> None:
        """Take, by title, the names of options apart by spaces, as in `{"ONNX": "onnx opset"}`."""
        super().__init__(*args, **kwargs)
        self._titles = {name: title for title, names in groups.items() for name in names.split()}
        self._order = ("Options", *groups)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        for title in self._order:
            group = [option for option in options if self._titles.get(str(option.name), "Options") == title]
            with formatter.section(title):
                formatter.write_dl([record for option in group if (record := option.get_help_record(ctx))])


@click.command(
    cls=_GroupedCommand, groups=_GROUPS, short_help="Export a model file (the default command).", epilog=_EXAMPLE
)
@click.argument("model")
@write_options
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="NAME",
    help="Program to capture: train, infer or eval-joint; repeatable. [default: what the model suggests]",
)
@click.option(
    "--dynamic",
    multiple=True,
    metavar="INPUT[:AXIS]=NAME[MIN:MAX]",
    help="A size, or an integer, that may vary; repeatable. 'x:0=batch[1:64]', 'batch[\"ids\"]:1=seq', 'y:0=2*batch'; "
    "an integer has no axis: 'steps=count[1:100]'.",
)
@click.option(
    "--recipe",
    type=click.Choice(("causal-lm", "causal-lm-packed", "seq2seq")),
    help="Export the programs by which a model of transformers trains and generates (-packed: trains on packed rows "
    "too); MODEL is a directory that `save_pretrained` wrote, or a model file with `model` alone.",
)
@click.option(
    "--weights",
    type=click.Path(exists=True, path_type=Path),
    metavar="DIR",
    help="Directory of safetensors files, or one such file, with the weights of the model, whose own are not made: a "
    "model may be larger than the memory.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast floating weights and example inputs first.")
@click.option(
    "--autocast",
    type=click.Choice(("bfloat16", "float16")),
    help="Serve calls under autocast to this dtype too, and loads in it (`load(dtype=)`): programs whose code casts by "
    "dtypes of values get variants.",
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(("serving",)),
    help="Ship what a purpose wants. serving: inference alone, with ONNX models and libraries for this machine's "
    "processor, as far as they can be made here.",
)
@onnx_options
@click.option("--onnx", is_flag=True, help="Add ONNX models of the programs that record no gradients.")
@click.option(
    "--label-free/--no-label-free",
    default=True,
    show_default=True,
    help="Where the example holds labels, capture inference for calls without them too.",
)
@click.option(
    "--verify",
    "verification",
    type=click.Choice(("fast", "standard", "full")),
    help="Calls in which the bundle is compared with eager: the example, sizes of 0, 1 and one more (fast); also other "
    "values, integers and least sizes (standard, the default); also eight of drawn values and sizes (full).",
)
@click.option(
    "--keep-operator",
    "keep_operators",
    multiple=True,
    metavar="NAME",
    help="Keep a custom operator written in Python (library::operator, or library), instead of tracing through it.",
)
@click.option(
    "--allow-untested-torch",
    is_flag=True,
    help="Try a release of torch that aotexport is not tested with; the bundle is compared with eager all the same.",
)
@click.option(
    "--dump-passes",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the forward graph of each program as text, as traced and after each pass.",
)
def export(
    model: str,
    programs: tuple[str, ...],
    dynamic: tuple[str, ...],
    recipe: str | None,
    weights: Path | None,
    dtype: str | None,
    purpose: str | None,
    onnx: bool,
    verification: str | None,
    keep_operators: tuple[str, ...],
    write: WriteOptions,
    **others: Any,
) -> None:
    """Export MODEL (model.py, model.py:attr, package.module:attr or file.pt2) to a bundle, and verify it against eager.

    The file offers `model` (a module, a class or function that makes one, or a function of tensors) and
    `example_inputs` (a tuple of positional arguments, a dict of keyword arguments, or a function that returns either).
    It may offer `example_kwargs`, `dynamic_shapes`, `variants` (further example calls), `programs`, `custom_ops`
    (modules to import), and `keep_operators` (custom operators that are not to be traced through).

    A .pt2 file is one of `torch.export.save`: its example inputs and dynamic sizes are taken, and the one mode that it
    was exported in. torch reads it, pickles by `weights_only`; export files that you trust.
    """
    serving = purpose == "serving"
    chosen = {name: others.pop(name) for name in ("opset", "state", "translations")}
    if any(chosen.values()) and not (onnx or serving):
        raise click.UsageError("--opset, --onnx-state and --onnx-translations are for --onnx; give both")
    if recipe is not None and weights is not None:
        raise click.UsageError("--weights is for a model file, and a recipe reads the weights of its directory")
    others |= write.keywords(verification)
    with write.running() as (progress, fresh):
        from aotexport.model.model_file import importable
        from aotexport.pipeline.options import ExportOptions

        # Checked before the model is built, which may take long; the model file may change the directory.
        onnx_asked = (onnx or serving) and read_options(chosen)
        options = ExportOptions(**others, onnx=onnx_asked, serving=serving, progress=progress)
        here = Path.cwd()
        options = replace(
            options, output=here / options.output, dump_passes=options.dump_passes and here / options.dump_passes
        )
        progress(f"load {model}")
        source = _source(model, recipe, weights, dtype)
        with importable(source.root):
            programs = programs or (("infer",) if serving and recipe is None else ())
            options = _of_source(options, source, programs, dynamic, keep_operators)
            progress("import torch's compiler")
            from aotexport.pipeline.export import export_as
            from aotexport.verify.report import costs, summarize

            report = export_as(source.target, source.example.args, dict(source.example.kwargs), options, fresh)
            summary = summarize(report, verified=bool(options.verify))
            if serving:
                summary["costs"] = costs(report)
    write.show(summary, progress)


def _source(model: str, recipe: str | None, weights: Path | None, dtype: str | None) -> ModelSource:
    import torch

    from aotexport.model.cast import cast
    from aotexport.model.recipes import load_recipe
    from aotexport.model.source import load_source

    source = load_source(model, weights) if recipe is None else load_recipe(recipe, model)
    return source if dtype is None else cast(source, getattr(torch, dtype))


def _of_source(
    options: ExportOptions,
    source: ModelSource,
    programs: tuple[str, ...],
    dynamic: tuple[str, ...],
    keep_operators: tuple[str, ...],
) -> ExportOptions:
    """Return options with those of a model file, beneath those of the command line."""
    from aotexport.model.dynamic_option import merge_dynamic

    described = {program.name: program for program in source.programs or () if not isinstance(program, str)}
    return replace(
        options,
        source_root=source.root,
        programs=[described.get(name, name) for name in programs] or source.programs,
        variants=source.variants,
        dynamic_shapes=merge_dynamic(source, dynamic),
        keep_operators=(*source.keep_operators, *keep_operators),
    )
