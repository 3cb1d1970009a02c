"""The contract of engines: guard rows, run, epilogue. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aotexport_runtime.guards.rule import GuardSource, Row


class Engine(Protocol):
    """What serves calls of one program, by one of its graphs or models.

    `select.py` chooses the engines of a program; a call runs the first of them whose guards it meets.

    Attributes:
        name: its name in `select.py`.
        rows: guards of the calls that it serves, beside those of the program; quick paths ask them.
    """

    name: str
    rows: Sequence[Row]

    def why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return why it does not serve a call that meets the program's guards; None: it does."""
        ...

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> Sequence[Any]:
        """Run a call that it serves, with all that the call changes; return the program's outputs.

        Args:
            inputs: one per input of the program; borrowed.
            symbols: value per symbol.
            because: why no engine before it serves the call.
        """
        ...

    def expression(self, source: GuardSource) -> str | None:
        """Return source of the outputs of a call that meets `rows`, by the variables of `source`.

        None: quick paths call `run`.
        """
        ...
