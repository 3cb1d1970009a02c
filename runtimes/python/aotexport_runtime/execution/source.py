"""Compiles generated source to functions; tracebacks and profiles show its lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from aotexport_runtime.schema.graph import Graph, Node, SourceLine

_serial = itertools.count()
_PREFIX = "<aotexport "


class Origin(NamedTuple):
    """The node that a line of a defined function runs: its operator, path of its module and line of the user's code."""

    op: str
    module: str | None
    source: SourceLine | None


def origin_of(node: Node, graph: Graph) -> Origin:
    """Return what a node of `graph` is of."""
    source = graph.sources[node.source] if node.source is not None and graph.sources else None
    module = graph.modules[node.module] if node.module is not None and graph.modules else None
    return Origin(node.op, module, source)


def line_of(node: Origin) -> str:
    """Return the line of the user's code as `file:line`; `unknown`: the bundle does not say it."""
    return "unknown" if node.source is None else f"{node.source.file}:{node.source.line}"


_origins: dict[str, Mapping[int, Origin]] = {}


def is_defined(filename: str) -> bool:
    """Return whether a file is the source of a defined function."""
    return filename.startswith(_PREFIX)


def origin(filename: str, line: int) -> Origin | None:
    """Return the node that a line of a defined function runs; None: it runs none, or is of another function."""
    found = _origins.get(filename) if is_defined(filename) else None
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
    return scope.pop(name)  # Its globals would hold it, and all that it reads, until garbage is looked for.
