"""`selftest bundle/`: compare bundles with the recorded results of eager execution."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from aotexport_runtime.cli.output import DIRECTORY, custom_options
from aotexport_runtime.errors import printable
from aotexport_runtime.values.arguments import check_torch, class_named, imported, places_of


@click.command(short_help="Compare bundles with the recorded results of eager execution.")
@click.argument("bundles", metavar="BUNDLE...", type=DIRECTORY, nargs=-1, required=True)
@click.option("--device", help="Where to run, for example cuda.")
@click.option("--target", "targets", multiple=True, help="Engine to test alone; repeatable.  [default: the bundle's]")
@click.option("--trust", type=click.Choice(["data", "native"]), default="data", show_default=True,
              help="native: run native files as well.")  # fmt: skip
@custom_options
@click.option("--sandbox", is_flag=True, help="First give up writing, network, programs (Linux).")
@click.option("--mapped", is_flag=True, help="Map weights; nobody may write into the files meanwhile.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON.")
@click.pass_context
def selftest(
    context: click.Context,
    bundles: tuple[Path, ...],
    device: str | None,
    targets: tuple[str, ...],
    trust: str,
    imports: tuple[str, ...],
    namespaces: tuple[str, ...],
    types: tuple[str, ...],
    sandbox: bool,
    mapped: bool,
    as_json: bool,
) -> None:
    """Run the recorded calls of bundles again, and compare; the exit code is 1 where anything differs."""
    if sandbox:
        from aotexport_runtime import sandbox as process

        readable = [*map(str, bundles), *places_of(name.partition(".")[0] for name in (*imports, *types))]
        process.enter(readable=readable)
    check_torch("a self-test")
    for name in imports:
        imported(name)
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.commands.results import describe_graphs
    from aotexport_runtime.commands.self_test import run_vectors
    from aotexport_runtime.schema.graph import DTENSOR
    from aotexport_runtime.values import meshes

    classes = {name: class_named(name) for name in types}
    if DTENSOR in classes:
        meshes.join_alone()
    results = [
        (str(path), result)
        for path in bundles
        for bundle in (open_bundle(path),)
        for target in targets or ["auto"]
        for result in run_vectors(
            bundle,
            device=device,
            target=target,
            trust=trust,
            operator_namespaces=namespaces,
            tensor_types=classes,
            mapped=mapped or None,
        )
    ]
    if as_json:
        click.echo(json.dumps([{"bundle": path, **asdict(each), "agrees": each.agrees} for path, each in results]))
    for path in () if as_json else map(str, bundles):
        for line in describe_graphs([result for at, result in results if at == path]):
            click.echo(printable(line if line.startswith(" ") else f"{path}: {line}"))
    if not (results or as_json):
        click.echo("no recorded calls")
    context.exit(0 if all(result.agrees for _, result in results) else 1)
