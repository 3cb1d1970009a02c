"""The fast path of a call: a generated function that serves the calls that a program gets most often. No torch.

Invariant: a call that it serves is admitted by the explaining path as well, with the same inputs and symbols, and
served by the same engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.rule import GuardSource, Kind, Row, input_name, quick_lines
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import Program, StateInput

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""`(args, kwargs) -> result of the call`."""

_TURN_AWAY = "return fallback(args, kwargs)"


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The guards of a fast path (`rows`), and the functions that it calls.

    Attributes:
        returned: makes the call's result of the program's outputs.
        kinds: return the kinds of tensors that it serves, the usual one first; others once torch is imported.
        fallback: takes the calls that the fast path does not serve.
    """

    program: Program
    signature: Signature
    rows: Sequence[Row]
    engine: Engine
    returned: Callable[[Any], Any]
    kinds: Sequence[Callable[[], Kind]]
    fallback: Call

    def function(self) -> Call:
        """Return a function for every call of the program; the fallback, where the program has no fast path."""
        passed = {index for index, spec in enumerate(self.program.inputs) if not isinstance(spec, StateInput)}
        positional, keywords = self.signature.plain_leaves, self.signature.plain_keywords
        positional = positional if positional is not None and set(positional) == passed else None
        keywords = keywords if keywords is not None and set(keywords.values()) == passed else None
        if positional is None and keywords is None:
            return self.fallback

        def function(kind: Kind, fallback: Call) -> Call:
            source = GuardSource(kind=kind)
            binding = _bound(source, positional, keywords)
            admitted = quick_lines(source, self.rows, _TURN_AWAY)
            if admitted is None:
                return fallback
            lines = [*binding, *admitted, f"return {self._served(source)}"]
            scope = {**source.scope, "fallback": fallback}
            return define("call", "args, kwargs", lines, scope, f"{self.program.name} call")

        usual, *others = self.kinds
        made: list[Call] = []

        def otherwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not made:
                if "torch" not in sys.modules:
                    return self.fallback(args, kwargs)
                made.append(function(others[0](), self.fallback))
            return made[0](args, kwargs)

        return function(usual(), otherwise if others else self.fallback)

    def _served(self, source: GuardSource) -> str:
        outputs = self.engine.expression(source)
        if outputs is None:
            inputs = ", ".join(map(input_name, range(len(self.program.inputs))))
            outputs = f"{source.constant(self.engine.run)}([{inputs}], {source.values_of(list(source.symbols))})"
        return f"{source.constant(self.returned)}({outputs})"


def _bound(source: GuardSource, positional: Sequence[int] | None, keywords: Mapping[str, int] | None) -> list[str]:
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
