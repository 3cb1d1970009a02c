"""What commands share: the argument of a bundle, and standard output for people or as one JSON document."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
BUNDLE = click.argument("bundle", type=DIRECTORY)
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The values of `--dtype`."""

_PIPED_WIDTH = 200


def stdout() -> Console:
    """Return a console on standard output; into a pipe it writes long lines instead of cutting them."""
    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if terminal else _PIPED_WIDTH, highlight=False, markup=False)


def print_json(document: Any) -> None:
    """Print one JSON document; numbers that are not finite become null."""
    click.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
