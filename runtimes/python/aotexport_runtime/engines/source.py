"""Compiles generated source to functions; tracebacks and profiles show its lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable
from typing import Any

_serial = itertools.count()


def define(name: str, parameters: str, body: Iterable[str], scope: dict[str, Any], label: str) -> Any:
    """Return the function that the source defines.

    Args:
        name: name of the function.
        parameters: its parameters, separated by commas.
        body: its lines; made of positions, numbers and names of `scope`, never of text of a bundle.
        scope: global names of the function, which owns the dict from now on.
        label: shown in tracebacks and profiles.
    """
    text = f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)
    filename = f"<aotexport {label} {next(_serial)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), scope)
    return scope[name]
