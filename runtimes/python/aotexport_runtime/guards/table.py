"""A table of guards: a function that explains why a call does not fit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from aotexport_runtime.errors import CallInvalid
from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.rule import Call, GuardSource, Row, input_name
from aotexport_runtime.values import sizes


class GuardTable:
    """Rows about the inputs of a program."""

    def __init__(self, stages: Sequence[Sequence[Row]], count: int, known: Sequence[str] = ()) -> None:
        """Prepare rows; source is generated when it is first needed.

        Args:
            stages: the rows, as they are explained; a stage is asked of calls that fit the ones before it.
            count: number of inputs.
            known: symbols whose values are known before.
        """
        self.stages = stages
        self.rows = [row for stage in stages for row in stage]
        self._count = count
        self._known = known

    def check(self, inputs: list[Any], symbols: dict[str, int]) -> list[str]:
        """Return one sentence per violation.

        Args:
            inputs: one entry per input; gets the state tensors.
            symbols: value per known symbol; gets the others.

        Raises:
            AotExportError: the first violation of a row whose error is not `CallInvalid`, if nothing else is violated.
        """
        found: list[str] = []
        for row in self.violations(inputs, symbols):
            assert row.rule.message is not None
            message = row.rule.message(row.subject, Call(inputs, symbols))
            if row.rule.error is CallInvalid:
                found.append(message)
            elif not found:
                raise row.rule.error(message)
        return found

    def first(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return the first violation in words; None: there is none."""
        row = next(self.violations(inputs, symbols), None)
        if row is None:
            return None
        assert row.rule.message is not None
        return row.rule.message(row.subject, Call(inputs, symbols))

    @cached_property
    def violations(self) -> Callable[[list[Any], Mapping[str, int]], Iterator[Row]]:
        """A function that yields the violated rows, in order, without those whose preconditions do not hold."""
        source = GuardSource(explains=True)
        closing = {row.number for row in self.rows if "subject" in row.rule.ends}
        gates = "".join(f"g{number} = " for number in sorted(closing))
        names = ", ".join(map(input_name, range(self._count)))
        taken = [f"{names}, = inputs"] if names else []
        lines = [*taken, *source.known(self._known), f"{gates}fits = ranks = known = True"]
        for stage in self.stages:
            for row in stage:
                lines += _asked(source, row, closing)
            lines.append("if not fits: return")
        return define("violations", "inputs, symbols", [*lines, "yield from ()"], source.scope, "guards in words")


def _asked(source: GuardSource, row: Row, closing: Set[int]) -> list[str]:
    """Return source that yields a row if its preconditions hold and it is violated."""
    rule, subject, number = row
    lines = rule.prepare(source, subject) if rule.prepare is not None else []
    holds = rule.holds(source, subject) if rule.message is not None else "True"
    if holds != "True":
        if rule.cost == "sizes" and source.symbols:
            lines += [f"try: holds = {holds}", f"except {source.constant(sizes.UNDEFINED)}: holds = False"]
            holds = "holds"
        ended = ["fits", *(f"g{number}" if gate == "subject" else _GATES[gate] for gate in rule.ends)]
        lines += [f"if not ({holds}):", f"    {' = '.join(ended)} = False", f"    yield {source.constant(row)}"]
    needed = [*([f"g{number}"] if number in closing else []), *(_GATES[gate] for gate in rule.needs)]
    if not needed or not lines:
        return lines
    return [f"if {' and '.join(needed)}:", *(f"    {line}" for line in lines)]


_GATES = {"ranks": "ranks", "symbols": "known"}
