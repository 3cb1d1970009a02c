"""`serve models/` and `triton-config bundle/`: bundles behind a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from aotexport_runtime.cli.output import BUNDLE
from aotexport_runtime.schema.limits import Limits
from aotexport_runtime.server.options import ServeOptions, options_of, sentences_of
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.values.arguments import check_torch


def _serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option per field of `ServeOptions`."""
    told = sentences_of(ServableOptions) | sentences_of(ServeOptions)
    kinds = get_type_hints(ServeOptions)
    for name in reversed([each.name for each in dataclasses.fields(ServeOptions)]):
        if name in ("repository", "adapters"):
            continue
        default, kind, flag = getattr(ServeOptions, name), kinds[name], name.replace("_", "-")
        how: dict[str, Any] = {"default": default, "help": told[name], "show_default": default not in (None, (), False)}
        is_choice = get_origin(kind) is Literal
        kind = kind if is_choice else next((each for each in get_args(kind) if each is not NoneType), kind)
        if kind is bool:
            flag, how["is_flag"] = f"{flag}/--no-{flag}" if default else flag, True
        elif isinstance(default, tuple):
            how |= {"multiple": True, "metavar": "NAME"}
        elif kind is Limits:
            how |= {"default": "", "show_default": False, "metavar": "NAME=NUMBER,..."}
        else:
            how["type"] = click.Choice(get_args(kind)) if is_choice else kind
        command = click.option(f"--{flag}", name, **how)(command)
    return command


@click.command(short_help="Serve a directory of bundles by the Open Inference Protocol.")
@click.argument("repository", type=click.Path(path_type=Path))
@_serve_options
@click.pass_context
def serve(context: click.Context, **given: Any) -> None:
    """Serve REPOSITORY, a bundle or a directory of them (MODEL/VERSION/ or MODEL/), by HTTP and gRPC."""
    options = options_of(given)
    from aotexport_runtime.server.supervisor import serve as run

    context.exit(run(options))


@click.command("triton-config", short_help="Print a bundle's config.pbtxt for Triton.")
@BUNDLE
@click.option("--name", help="Of the model in Triton's repository.  [default: the directory's]")
@click.option("--max-batch-size", type=int, default=32, show_default=True, help="Greatest joined batch.")
def triton_config(bundle: Path, name: str | None, max_batch_size: int) -> None:
    """Print the config.pbtxt of BUNDLE for Triton's Python backend."""
    check_torch("Triton's configuration")
    from aotexport_runtime.server.messages import Signature
    from aotexport_runtime.server.triton_config import config_text, model_config
    from aotexport_runtime.serving.servable import Servable

    servable = Servable(str(bundle), max_batch_size=max_batch_size)
    servable.warm_up()
    signature = Signature.of(servable.inputs, servable.outputs)
    config = model_config(name or bundle.resolve().name, signature, servable.batch_axes, max_batch_size, "python")
    click.echo(config_text(config), nl=False)
