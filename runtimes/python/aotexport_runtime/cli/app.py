"""The group of commands. Exit codes: 1 it failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from aotexport_runtime.cli.finetune import finetune
from aotexport_runtime.cli.hub import pull, push
from aotexport_runtime.cli.inspect import bom, check, diff, doctor, explain_command, inspect, view
from aotexport_runtime.cli.report import profile, report
from aotexport_runtime.cli.selftest import selftest
from aotexport_runtime.cli.serve import serve, triton_config
from aotexport_runtime.cli.sign import sign, verify_signature_command
from aotexport_runtime.errors import AotExportError, coded, printable

COMMANDS: tuple[click.Command, ...] = (
    *(inspect, check, diff, report, profile, view, selftest, finetune, serve, triton_config),
    *(push, pull, bom, sign, verify_signature_command, doctor, explain_command),
)
INTERRUPTED = 130


class _App(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AotExportError as error:
            ctx.exit(tell(error))
        except KeyboardInterrupt:
            print_error("interrupted")
            ctx.exit(INTERRUPTED)


def tell(error: AotExportError) -> int:
    """Print what ended a command; return the exit code."""
    print_error(coded(error))
    return error.exit_code


def print_error(message: str) -> None:
    """Print a message to standard error, as that of an error."""
    click.echo(click.style("error: ", fg="red", bold=True) + printable(message.rstrip()), err=True)


@click.group(cls=_App, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """Show, check, run, train and serve bundles."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    try:
        app.main(arguments, prog_name="python -m aotexport_runtime")
    except SystemExit as end:
        return int(end.code or 0)
