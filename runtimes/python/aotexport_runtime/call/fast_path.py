"""The fast path of a call: a generated function that serves the calls that a program gets most often. No torch.

Invariant: a call that it serves is admitted by the explaining path as well, with the same inputs and symbols, and
served by the same engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.guards.kinds import Kind
from aotexport_runtime.guards.quick_path import Call, bind, quick_path
from aotexport_runtime.guards.rule import GuardSource, Row, input_name
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import Program, StateInput


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The guards of a fast path, and the functions that it calls.

    Attributes:
        program: its record.
        signature: binds calls.
        rows: guards of the calls that it serves.
        engine: runs them.
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
            binding = bind(source, positional, keywords)
            return quick_path(source, binding, self.rows, self._served, fallback, f"{self.program.name} call")

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
        """Return the expression of a call's result."""
        outputs = self.engine.expression(source)
        if outputs is None:
            inputs = ", ".join(map(input_name, range(len(self.program.inputs))))
            symbols = ", ".join(f"{source.constant(symbol)}: {name}" for symbol, name in source.symbols.items())
            outputs = f"{source.constant(self.engine.run)}([{inputs}], {{{symbols}}})"
        return f"{source.constant(self.returned)}({outputs})"
