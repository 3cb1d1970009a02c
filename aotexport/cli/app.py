"""The group of commands. Exit codes: 1 it failed, 2 wrong usage or model file, 3 a bug, 130 interrupted."""

from __future__ import annotations

import atexit
import os
import platform
import signal
import sys
import traceback
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import click

import aotexport
from aotexport.cli.convert import convert
from aotexport.cli.derive import derive
from aotexport.cli.export import export
from aotexport.cli.onnx import onnx
from aotexport.cli.verify import verify
from aotexport.errors import InternalError
from aotexport_runtime.cli.app import COMMANDS, INTERRUPTED, print_error, tell
from aotexport_runtime.errors import AotExportError, printable

_EXAMPLE = """\b
Example:
  aotexport model.py -o bundle/
  aotexport inspect bundle/
\b
`aotexport export --help` shows the options of an export; `aotexport explain CODE` what a code behind an error means.
"""
_interrupts: list[int] = []
_OWN_OPTIONS = ("--help", "-h", "--version")


class _App(click.Group):
    """A group whose first argument may be a model file: then the command is `export`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in _OWN_OPTIONS:
            self._check_is_model(ctx, args[0])
            args = ["export", *args]
        return super().parse_args(ctx, args)

    def _check_is_model(self, ctx: click.Context, argument: str) -> None:
        if Path(argument, "bundle.json").is_file():
            ctx.fail(f"`{argument}` is a bundle; write `aotexport inspect {argument}`")
        if (
            not argument.startswith("-")
            and not any(mark in argument for mark in ".:/")
            and not os.path.exists(argument)
        ):
            ctx.fail(f"`{argument}` is neither a model file nor a command; the commands are {', '.join(self.commands)}")

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("aotexport", "MODEL.py -o BUNDLE [OPTIONS]")
        formatter.write_usage("aotexport", "COMMAND [ARGUMENTS]", prefix="       ")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told, with its traceback where it is a bug
            ctx.exit(_tell(error))


def _tell(error: Exception | KeyboardInterrupt) -> int:
    """Print what ended a command; return the exit code."""
    if _interrupts or isinstance(error, KeyboardInterrupt):
        print_error("interrupted; nothing was written")
        return INTERRUPTED
    if isinstance(error, AotExportError):
        code = tell(error)
        if isinstance(error, InternalError):
            _print_traceback(error.__cause__ or error)
        return code
    torch = next((each.version for each in metadata.distributions(name="torch")), "(not installed)")
    print_error(
        f"aotexport failed where it should not ({type(error).__name__}). Please report this as a bug, with these "
        f"versions (aotexport {aotexport.__version__}, torch {torch}, Python {platform.python_version()}) and the "
        "lines below"
    )
    _print_traceback(error)
    return InternalError.exit_code


def _print_traceback(error: BaseException) -> None:
    click.echo(printable("".join(traceback.format_exception(error))), err=True)


@click.group(cls=_App, epilog=_EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(aotexport.__version__, message="aotexport %(version)s")
def app() -> None:
    """Turn a PyTorch model into a portable bundle, and look at bundles."""


for command in (export, derive, verify, onnx, convert, *COMMANDS):
    app.add_command(command)


def main() -> None:
    """Run the command line; exits with the code of the command."""
    # OpenMP's threads spin while they wait, by default: on a busy machine that takes more time than all the rest.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        app.main(prog_name="aotexport")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # All is put back by now. Taking an interpreter with torch down takes seconds on a busy machine; what
            # libraries registered does not, and without it Python 3.14 tells of semaphores that are left.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and note it: imports of other libraries turn it into errors of their own."""
    _interrupts.append(number)
    signal.default_int_handler(number, frame)
