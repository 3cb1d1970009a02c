"""`aotexport verify bundle/`: compare a bundle with eager execution."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from aotexport.cli.output import DTYPES
from aotexport.cli.progress import Progress
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.cli.output import BUNDLE, custom_options, print_json, printed_elsewhere
from aotexport_runtime.commands.results import VectorResult, describe_graphs
from aotexport_runtime.errors import printable
from aotexport_runtime.values.arguments import imported

_EXAMPLE = """\b
Example:
  aotexport verify bundle/ --against model.py
  aotexport verify bundle/ --kernels
"""


@click.command(short_help="Compare a bundle with eager execution.", epilog=_EXAMPLE)
@BUNDLE
@click.option("--against", metavar="MODEL", help="Model file to compare with; it is given the bundle's weights.")
@click.option("--kernels", is_flag=True, help="Run the GPU kernels, from their sources, on the CPU; slow.")
@click.option("--dtype", type=click.Choice(DTYPES), help="With --against: cast the model first, as at the export.")
@custom_options
@click.option("--json", "as_json", is_flag=True, help="Print the comparisons as JSON.")
@click.pass_context
def verify(
    context: click.Context,
    bundle: Path,
    against: str | None,
    kernels: bool,
    dtype: str | None,
    imports: tuple[str, ...],
    namespaces: tuple[str, ...],
    types: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare BUNDLE with eager execution, by its functional graphs and by its forward graphs.

    Without --against, a fresh process that has only the runtime runs the calls that the export recorded. With
    --against, the model file's model gets the bundle's weights and runs eagerly; the bundle must do the same. With
    --kernels, the recorded calls run on the kernels of target `cuda`, by Triton's interpreter: that executes Python
    code of the bundle, so do it with bundles that you trust.

    The exit code is 1 when anything differs.
    """
    if dtype is not None and against is None:
        raise click.UsageError("--dtype casts the model of --against; give both")
    if kernels and against is not None:
        raise click.UsageError("--kernels runs the recorded calls; it does not go with --against")
    opened = open_bundle(bundle)
    with printed_elsewhere(as_json), Progress() as progress:
        if kernels:
            progress("interpret the kernels in a process of their own")
            results = _run_kernels(opened)
        elif against is None:
            progress("run recorded calls in a fresh process")
            from aotexport.verify.bundles import TARGETS, allowing, run_selftest

            results = run_selftest(bundle, TARGETS, allowing(imports, namespaces, types))
        else:
            progress(f"compare with {against}")
            results = _run_against(opened, against, dtype, imports, namespaces)
    results = [result for result in results if _counts(opened, result)]
    agrees = all(result.agrees for result in results)
    if as_json:
        calls = [{**dataclasses.asdict(result), "agrees": result.agrees} for result in results]
        print_json({"agrees": agrees, "calls": calls})
    else:
        click.echo(printable("\n".join(describe_graphs(results) or ["nothing was compared"])))
    context.exit(0 if results and agrees else 1)


def _run_kernels(bundle: Bundle) -> list[VectorResult]:
    from aotexport.verify.interpret import interpret

    found = interpret(bundle)
    if found.drawing:
        names = ", ".join(found.drawing)
        click.echo(f"not compared, for they draw random numbers in an order of their own: {printable(names)}", err=True)
    return found.results


def _run_against(
    bundle: Bundle, against: str, dtype: str | None, imports: tuple[str, ...], namespaces: tuple[str, ...]
) -> list[VectorResult]:
    import torch

    from aotexport.model.cast import cast
    from aotexport.model.model_file import importable
    from aotexport.model.source import load_source
    from aotexport.verify.against import compare_with_model
    from aotexport.verify.bundles import TARGETS

    source = load_source(against)
    with importable(source.root):
        for name in imports:
            imported(name)
        if dtype is not None:
            source = cast(source, getattr(torch, dtype))
        return compare_with_model(bundle, source, targets=TARGETS, operator_namespaces=namespaces)


def _counts(bundle: Bundle, result: VectorResult) -> bool:
    """Return whether the result decides: a forward graph without custom backwards need not give the gradients."""
    program = bundle.program(result.program)
    return result.target != "autograd" or program.forward.differentiable or not program.grad
