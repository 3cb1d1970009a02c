"""Compiles generated source to functions; tracebacks and profiles show its lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from aotexport_runtime.schema.graph import SourceLine

_serial = itertools.count()
_PREFIX = "<aotexport "
_original_lines: dict[str, Mapping[int, SourceLine]] = {}


def original_line(filename: str, line: int) -> SourceLine | None:
    """Return the line of the original model's code that a line of a defined function runs; None: it is not known."""
    found = _original_lines.get(filename) if filename.startswith(_PREFIX) else None
    return None if found is None else found.get(line)


def define(
    name: str,
    parameters: str,
    body: Iterable[str],
    scope: dict[str, Any],
    label: str,
    lines: Mapping[int, SourceLine] = MappingProxyType({}),
) -> Any:
    """Return the function `name` of `parameters`, separated by commas, that the lines of `body` define.

    They are made of positions, numbers and names of `scope`, its globals, never of text of a bundle. `label` is shown
    in tracebacks and profiles; `lines` are those of the original model by the index of a line in `body`.
    """
    text = f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)
    filename = f"{_PREFIX}{label} {next(_serial)}>"
    if lines:
        _original_lines[filename] = {index + 2: line for index, line in lines.items()}
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), scope)
    return scope[name]
