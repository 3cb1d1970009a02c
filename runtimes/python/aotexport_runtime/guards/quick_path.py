"""Generated functions that serve the usual calls of a program, and pass the others to a fallback. No torch.

They ask the quick forms of a table's rows; for other calls, signature and table decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.rule import GuardSource, Row, input_name
from aotexport_runtime.guards.table import quick_lines

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""`(args, kwargs) -> result of the call`."""

_TURN_AWAY = "return fallback(args, kwargs)"


def bind(source: GuardSource, positional: Sequence[int] | None, keywords: Mapping[str, int] | None = None) -> list[str]:
    """Return lines that bind the arguments of a call that passes all by position, or all by name.

    Args:
        source: gets the names.
        positional: input per positional argument; None: calls by position go to the fallback.
        keywords: input per name; None: calls by name go to the fallback.
    """
    count = -1 if positional is None else len(positional)
    taken = [f"{', '.join(map(input_name, positional))}, = args"] if positional else []
    if not keywords:
        return [f"if kwargs or len(args) != {count}: {_TURN_AWAY}", *taken]
    values = ", ".join(f"kwargs[{source.constant(name)}]" for name in keywords)
    return [
        "if kwargs:",
        f"    if args or len(kwargs) != {len(keywords)}: {_TURN_AWAY}",
        f"    try: {', '.join(map(input_name, keywords.values()))}, = {values},",
        f"    except KeyError: {_TURN_AWAY}",
        f"elif len(args) != {count}: {_TURN_AWAY}",
        *(f"else: {line}" for line in taken),
    ]


def quick_path(
    source: GuardSource,
    binding: Sequence[str],
    rows: Sequence[Row],
    serve: Callable[[GuardSource], str],
    fallback: Call,
    label: str,
) -> Call:
    """Return a function that serves the calls that fit `rows`; `fallback` where a row has no quick form.

    Args:
        source: holds the constants of `binding`.
        binding: lines that bind the arguments, see `bind`.
        rows: guards of the calls.
        serve: returns the expression of a served call's result.
        fallback: takes the other calls.
        label: shown in tracebacks.
    """
    lines = quick_lines(source, rows, _TURN_AWAY)
    if lines is None:
        return fallback
    lines = [*binding, *lines, f"return {serve(source)}"]
    return define("call", "args, kwargs", lines, {**source.scope, "fallback": fallback}, label)
