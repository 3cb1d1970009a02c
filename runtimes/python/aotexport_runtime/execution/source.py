"""Compiles generated source to functions; tracebacks and profiles show its lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from aotexport_runtime.schema.graph import SourceLine

_serial = itertools.count()
_PREFIX = "<aotexport "


class Origin(NamedTuple):
    """The node that a line of a defined function runs: its operator, path of its module and line of the user's code."""

    op: str
    module: str | None
    source: SourceLine | None


_origins: dict[str, Mapping[int, Origin]] = {}


def origin(filename: str, line: int) -> Origin | None:
    """Return the node that a line of a defined function runs; None: it runs none, or is of another function."""
    found = _origins.get(filename) if filename.startswith(_PREFIX) else None
    return None if found is None else found.get(line)


def original_line(filename: str, line: int) -> SourceLine | None:
    """Return the line of the original model's code that a line of a defined function runs; None: it is not known."""
    found = origin(filename, line)
    return None if found is None else found.source


def define(
    name: str,
    parameters: str,
    body: Iterable[str],
    scope: dict[str, Any],
    label: str,
    origins: Mapping[int, Origin] = MappingProxyType({}),
) -> Any:
    """Return the function `name` of `parameters`, separated by commas, that the lines of `body` define.

    They are made of positions, numbers and names of `scope`, its globals, never of text of a bundle. `label` is shown
    in tracebacks and profiles; `origins` are the nodes by the index of a line in `body`.
    """
    text = f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)
    filename = f"{_PREFIX}{label} {next(_serial)}>"
    if origins:
        _origins[filename] = {index + 2: each for index, each in origins.items()}
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), scope)
    return scope[name]
