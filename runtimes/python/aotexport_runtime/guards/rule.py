"""Rules about the calls that a program serves, rows of a program, and tables that explain. No torch.

A row holds its predicate as Python source. The fast path and the function that explains are both generated from it.
Source holds positions and integers alone; strings of the bundle go into a table of constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from aotexport_runtime.errors import AotExportError, CallInvalid
from aotexport_runtime.execution.source import define
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.values import sizes

Cost = Literal["mode", "tensor", "sizes", "memory"]
"""The object of a predicate, from cheap to dear: `mode`: the process, once a call; `tensor`: an attribute of a tensor;
`sizes`: arithmetic over the sizes of the call; `memory`: the storages of all tensors. Quick paths ask in this order."""

COSTS: tuple[Cost, ...] = ("mode", "tensor", "sizes", "memory")

Gate = Literal["ranks", "symbols"]
"""A precondition of a row: `ranks`: all tensors have their ranks; `symbols`: every symbol has a value."""

Ended = Literal["subject", Gate]
"""What a violated row ends: a gate, or the later rows of its subject."""


def input_name(index: int) -> str:
    """Return the name of the variable that holds a program's input."""
    return f"v{index}"


class Call(NamedTuple):
    """A call that violates a row, for its message: an entry per input of the program, the symbols as far as known."""

    inputs: Sequence[Any]
    symbols: Mapping[str, int]


# --- kinds of tensors that quick paths serve ----------------------------------------------------------------

Constant = Callable[[Any], str]
"""Returns the name of a constant in generated source."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Source of questions about the tensor in a variable; "True" where there is nothing to ask.

    Attributes:
        is_plain: is it a tensor of this kind, of no subclass?
        has_dtype: has it a dtype, by its name in the format?
        is_on: is it on the first of some types of devices?
        is_strided: is it no sparse tensor?
        has_autograd: whether it has torch's attributes: `stride()`, `requires_grad`.
    """

    is_plain: Callable[[Constant, str], str]
    has_dtype: Callable[[Constant, str, str], str]
    is_on: Callable[[Constant, str, Sequence[str]], str]
    is_strided: Callable[[Constant, str], str]
    has_autograd: bool


ARRAYS = Kind(
    is_plain=lambda constant, value: f"type({value}) is {constant(np.ndarray)}",
    has_dtype=lambda constant, value, dtype: f"{value}.dtype is {constant(np.dtype(dtype))}",
    is_on=lambda constant, value, types: str("cpu" in types),
    is_strided=lambda constant, value: "True",
    has_autograd=False,
)
"""Arrays of numpy, in the processor's order of bytes."""


def torch_tensors() -> Kind:
    """Return the kind of tensors of torch, which this imports."""
    import torch

    from aotexport_runtime.values import dtypes

    def is_on(constant: Constant, value: str, types: Sequence[str]) -> str:
        # Several times as fast as reading the device.
        return (
            f"{value}.is_{types[0]}" if types[0] in ("cpu", "cuda") else f"{value}.device.type == {constant(types[0])}"
        )

    return Kind(
        is_plain=lambda constant, value: (
            f"type({value}) is {constant(torch.Tensor)} or type({value}) is {constant(torch.nn.Parameter)}"
        ),
        has_dtype=lambda constant, value, dtype: f"{value}.dtype is {constant(dtypes.dtype(dtype))}",
        is_on=is_on,
        is_strided=lambda constant, value: f"{value}.layout is {constant(torch.strided)}",
        has_autograd=True,
    )


# --- rules --------------------------------------------------------------------------------------------------


@dataclass
class GuardSource:
    """The names that the source of predicates refers to: constants in `scope`, the source of symbols.

    `kind`: kind of the tensors of a quick path. `explains`: it is the source of the function that explains.
    """

    kind: Kind = ARRAYS
    explains: bool = False
    scope: dict[str, Any] = field(default_factory=lambda: dict[str, Any](sizes.SCOPE))
    symbols: dict[str, str] = field(default_factory=dict[str, str])

    def constant(self, value: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def ask(self, function: Callable[..., Any], *arguments: str) -> str:
        """Return the source of a call of `function`; arguments are source."""
        return f"{self.constant(function)}({', '.join(arguments)})"

    def size(self, size: Size) -> str:
        """Return the source of a size."""
        return sizes.source(size, self.symbols.__getitem__)

    def condition(self, size: Size) -> str:
        """Return the source of a condition over sizes."""
        make = sizes.condition_source if self.explains else sizes.source
        return make(size, self.symbols.__getitem__)

    def shape(self, shape: Sequence[Size]) -> str:
        """Return the source of a tuple of sizes."""
        if all(isinstance(size, int) for size in shape):
            return self.constant(tuple(shape))
        return f"({''.join(f'{self.size(size)}, ' for size in shape)})"

    def known(self, symbols: Sequence[str]) -> list[str]:
        """Return lines that bind known symbols from the argument `symbols`."""
        self.symbols = {symbol: f"s{number}" for number, symbol in enumerate(symbols)}
        return [f"{name} = symbols[{self.constant(symbol)}]" for symbol, name in self.symbols.items()]


Facts = TypeVar("Facts")
Subject = TypeVar("Subject")


@dataclass(frozen=True, kw_only=True)
class GuardRule(Generic[Facts, Subject]):
    """A row of a table of guards.

    Attributes:
        name: of the row, unique in its table.
        cost: see `Cost`.
        of: returns its subjects, given the facts of the program: inputs, symbols, or one subject for the whole call.
            Consecutive rows with one `of` are asked subject by subject.
        holds: source of its predicate; it may raise `sizes.UNDEFINED`, which counts as a violation.
        message: describes a violation, for people. None: a condition of quick paths alone, no rule of the program.
        quick: source that quick paths use in place of `holds`; None: they use `holds`. If it returns None, the program
            has no quick path.
        stricter: whether `quick` also rejects calls for which the row holds. It never admits others.
        prepare: lines before it, which bind variables.
        needs: its preconditions.
        ends: preconditions that do not hold after a violation.
        error: class of the error of a violation; `CallInvalid` is raised with all violations.
    """

    name: str
    cost: Cost
    of: Callable[[Facts], Iterable[Subject]]
    holds: Callable[[GuardSource, Subject], str]
    message: Callable[[Subject, Call], str] | None
    quick: Callable[[GuardSource, Subject], str | None] | None = None
    stricter: bool = False
    prepare: Callable[[GuardSource, Subject], list[str]] | None = None
    needs: tuple[Gate, ...] = ()
    ends: tuple[Ended, ...] = ()
    error: type[AotExportError] = CallInvalid


class Row(NamedTuple):
    """A rule about one subject, which the `number` of its first row in the table identifies."""

    rule: GuardRule[Any, Any]
    subject: Any
    number: int


def rows(rules: Sequence[GuardRule[Facts, Any]], facts: Facts, *, after: Sequence[Row] = ()) -> list[Row]:
    """Return the rows of a program, in the order in which they are explained, below those of `after` in the table."""
    found: list[Row] = []
    for of, group in groupby(rules, key=lambda rule: rule.of):
        together = list(group)
        for subject in of(facts):
            number = len(after) + len(found)
            found += [Row(rule, subject, number) for rule in together]
    return found


# --- tables -------------------------------------------------------------------------------------------------


def quick_lines(source: GuardSource, rows: Sequence[Row], turn_away: str) -> list[str] | None:
    """Return lines that run to their end for calls that fit, cheap predicates first; None: a row is not quick.

    `turn_away` is the statement for other calls, and for those that only `GuardTable.violations` admits.
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
            stages: the rows, as they are explained; a stage is asked of calls that fit the ones before it.
            count: number of inputs.
            kind: kind of the tensors of usual calls, which one quick question answers; None: there is none.
            known: symbols whose values are known before.
        """
        self.stages = stages
        self.rows = [row for stage in stages for row in stage]
        names = ", ".join(map(input_name, range(count)))
        self._inputs = [f"{names}, = inputs"] if names else []
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
        if self._admits is not None and self._admits(inputs, symbols):
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
    def _admits(self) -> Callable[[list[Any], dict[str, int]], bool] | None:
        """Whether all rows hold, by the quick forms of their predicates; None: some have none."""
        source = GuardSource(kind=self._kind or ARRAYS)
        lines = [*self._inputs, *source.known(self._known)]
        quick = None if self._kind is None else quick_lines(source, self.rows, "return False")
        if quick is None:
            return None
        bound = () if self._known else source.symbols.items()
        lines += [*quick, *(f"symbols[{source.constant(symbol)}] = {name}" for symbol, name in bound)]
        state = [row.subject.index for row in self.rows if row.rule.name == "present"]
        lines += [*(f"inputs[{index}] = {input_name(index)}" for index in state), "return True"]
        return define("admits", "inputs, symbols", lines, source.scope, "guards")

    @cached_property
    def violations(self) -> Callable[[list[Any], Mapping[str, int]], Iterator[Row]]:
        """A function that yields the violated rows, in order, without those whose preconditions do not hold."""
        source = GuardSource(explains=True)
        closing = {row.number for row in self.rows if "subject" in row.rule.ends}
        gates = "".join(f"g{number} = " for number in sorted(closing))
        lines = [*self._inputs, *source.known(self._known), f"{gates}fits = ranks = known = True"]
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
