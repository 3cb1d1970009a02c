"""A table of guards: source that only answers, and a function that explains. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from aotexport_runtime.errors import CallInvalid
from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.kinds import Kind
from aotexport_runtime.guards.rule import COSTS, Call, GuardSource, Row, input_name
from aotexport_runtime.values import sizes


def quick_lines(source: GuardSource, rows: Sequence[Row], turn_away: str) -> list[str] | None:
    """Return source that runs to its end for calls that fit `rows`, cheap predicates first; None: a row is not quick.

    Args:
        source: gets the constants and symbols of the predicates.
        rows: the rows.
        turn_away: the statement for other calls, and for those that only `GuardTable.violations` admits.
    """
    lines: list[tuple[str, bool]] = []
    for rule, subject, _ in sorted(rows, key=lambda row: COSTS.index(row.rule.cost)):
        lines += [(line, False) for line in (rule.prepare(source, subject) if rule.prepare is not None else ())]
        predicate = (rule.quick or rule.holds)(source, subject)
        if predicate is None:
            return None
        if predicate != "True":
            lines.append((f"if not ({predicate}): ", True))
    if not source.symbols:
        return [f"{line}{turn_away}" if turns_away else line for line, turns_away in lines]
    # What is turned away to may run code of the caller, whose errors are none of the predicates': it is outside.
    return [
        "for fits in (False,):",
        "    try:",
        *(f"        {line}{'break' if turns_away else ''}" for line, turns_away in lines),
        f"    except {source.constant(sizes.UNDEFINED)}: break",
        "    fits = True",
        f"if not fits: {turn_away}",
    ]


class GuardTable:
    """Rows about the inputs of a program."""

    def __init__(
        self, stages: Sequence[Sequence[Row]], count: int, kind: Kind | None = None, known: Sequence[str] = ()
    ) -> None:
        """Prepare rows; source is generated when it is first needed.

        Args:
            stages: the rows, in the order in which they are explained; a stage is asked of calls that fit the ones
                before it.
            count: number of inputs.
            kind: kind of the tensors that `admits` serves; None: there is no `admits`.
            known: symbols whose values are known before.
        """
        self.stages = stages
        self.rows = [row for stage in stages for row in stage]
        self._count = count
        self._kind = kind
        self._known = known

    def check(self, inputs: list[Any], symbols: dict[str, int]) -> list[str]:
        """Return one sentence per violation.

        Args:
            inputs: one entry per input; gets the state tensors.
            symbols: value per known symbol; gets the others.

        Raises:
            AotExportError: the first violation of a row whose error is not `CallInvalid`, if nothing else is violated.
        """
        if self.admits is not None and self.admits(inputs, symbols):
            return []
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
    def admits(self) -> Callable[[list[Any], dict[str, int]], bool] | None:
        """Whether all rows hold, by the quick forms of their predicates; None: some have none."""
        if self._kind is None:
            return None
        source = GuardSource(kind=self._kind)
        lines = [*self._inputs(), *source.known(self._known)]
        quick = quick_lines(source, self.rows, "return False")
        if quick is None:
            return None
        lines += [*quick, *self._results(source), "return True"]
        return define("admits", "inputs, symbols", lines, source.scope, "guards")

    @cached_property
    def violations(self) -> Callable[[list[Any], Mapping[str, int]], Iterator[Row]]:
        """A function that yields the violated rows, in order, without those whose preconditions do not hold."""
        source = GuardSource(explains=True)
        closing = {row.number for row in self.rows if "subject" in row.rule.ends}
        gates = "".join(f"g{number} = " for number in sorted(closing))
        lines = [*self._inputs(), *source.known(self._known), f"{gates}fits = ranks = known = True"]
        for stage in self.stages:
            for row in stage:
                lines += _asked(source, row, closing)
            lines.append("if not fits: return")
        return define("violations", "inputs, symbols", [*lines, "yield from ()"], source.scope, "guards in words")

    def _inputs(self) -> list[str]:
        names = ", ".join(map(input_name, range(self._count)))
        return [f"{names}, = inputs"] if names else []

    def _results(self, source: GuardSource) -> list[str]:
        """Return lines that store symbols and state tensors, bound by rows, in `symbols` and `inputs`."""
        bound = [f"symbols[{source.constant(symbol)}] = {name}" for symbol, name in source.symbols.items()]
        taken = [row.subject.index for row in self.rows if row.rule.name == "present"]
        return [*(bound if not self._known else []), *(f"inputs[{i}] = {input_name(i)}" for i in taken)]


def _asked(source: GuardSource, row: Row, closing: Set[int]) -> list[str]:
    """Return source that yields a row if its preconditions hold and it is violated.

    Args:
        source: gets its constants and symbols.
        row: the row.
        closing: numbers of the subjects that a violation may close.
    """
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
