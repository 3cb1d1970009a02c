"""Rows: the guards of a program's calls, and tables of them that explain. No torch.

A row holds its predicate as Python source. The fast path and the function that explains are both generated from it.
Source holds positions and integers alone; strings of the bundle go into a table of constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from aotexport_runtime.errors import AotExportError, CallInvalid
from aotexport_runtime.execution.source import define
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.values import sizes
from aotexport_runtime.values.tensors import is_tensor

Cost = Literal["mode", "tensor", "sizes", "memory"]
"""The object of a predicate, from cheap to dear: `mode`: the process, once a call; `tensor`: an attribute of a tensor;
`sizes`: arithmetic over the sizes of the call; `memory`: the storages of all tensors. Quick paths ask in this order."""

COSTS: tuple[Cost, ...] = ("mode", "tensor", "sizes", "memory")

Gate = Literal["ranks", "symbols"]
"""A precondition: `ranks`: all tensors have their ranks; `symbols`: moreover, every symbol has a value."""


def input_name(index: int) -> str:
    """Return the name of the variable that holds a program's input."""
    return f"v{index}"


def name_of(value: Any) -> str:
    """Return the format's name of a dtype or layout (`torch.float32`: `float32`)."""
    return str(value).removeprefix("torch.")


class Call(NamedTuple):
    """A call that violates a row, for its message: an entry per input of the program, the symbols as far as known."""

    inputs: Sequence[Any]
    symbols: Mapping[str, int]


# --- the source of predicates -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Source of questions about the tensor in a variable; "True" where there is nothing to ask.

    Is it plain, of no subclass; has it a dtype, by its name in the format; is it on one of some types of devices (for
    quick paths, on the first)? `has_autograd`: whether it has torch's attributes: `stride()`, `requires_grad`.
    """

    is_plain: Callable[[GuardSource, str], str]
    has_dtype: Callable[[GuardSource, str, str], str]
    is_on: Callable[[GuardSource, str, Sequence[str]], str]
    is_strided: Callable[[GuardSource, str], str]
    has_autograd: bool


ANY = Kind(
    is_plain=lambda source, value: source.ask(is_tensor, value),
    has_dtype=lambda source, value, dtype: f"{source.ask(name_of, f'{value}.dtype')} == {source.constant(dtype)}",
    is_on=lambda source, value, types: f"{value}.device.type in {source.constant(types)}",
    is_strided=lambda source, value: f"{source.ask(name_of, f'{value}.layout')} == 'strided'",
    has_autograd=True,
)
"""Tensors and arrays of every kind, for explanations."""

ARRAYS = Kind(
    is_plain=lambda source, value: f"type({value}) is {source.constant(np.ndarray)}",
    has_dtype=lambda source, value, dtype: f"{value}.dtype is {source.constant(np.dtype(dtype))}",
    is_on=lambda source, value, types: str("cpu" in types),
    is_strided=lambda source, value: "True",
    has_autograd=False,
)
"""Arrays of numpy, in the processor's order of bytes."""


def torch_tensors() -> Kind:
    """Return the kind of tensors of torch, which this imports."""
    import torch

    from aotexport_runtime.values import dtypes

    def is_plain(source: GuardSource, value: str) -> str:
        tensor, parameter = source.constant(torch.Tensor), source.constant(torch.nn.Parameter)
        return f"type({value}) is {tensor} or type({value}) is {parameter}"

    def is_on(source: GuardSource, value: str, types: Sequence[str]) -> str:
        # Several times as fast as reading the device.
        fast = types[0] in ("cpu", "cuda")
        return f"{value}.is_{types[0]}" if fast else f"{value}.device.type == {source.constant(types[0])}"

    return Kind(
        is_plain=is_plain,
        has_dtype=lambda source, value, dtype: f"{value}.dtype is {source.constant(dtypes.dtype(dtype))}",
        is_on=is_on,
        is_strided=lambda source, value: f"{value}.layout is {source.constant(torch.strided)}",
        has_autograd=True,
    )


@dataclass
class GuardSource:
    """The names that the source of predicates refers to: constants in `scope`, the source of symbols.

    `kind` is that of the tensors that are asked about; `ANY`: in the function that explains, whose arguments `inputs`
    and `symbols` get what rows bind.
    """

    kind: Kind = ANY
    scope: dict[str, Any] = field(default_factory=lambda: dict[str, Any](sizes.SCOPE))
    symbols: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def explains(self) -> bool:
        """Whether it is that of the function that explains."""
        return self.kind is ANY

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

    def values_of(self, symbols: Sequence[str]) -> str:
        """Return the source of a dict of the values of symbols."""
        return f"{{{', '.join(f'{self.constant(symbol)}: {self.symbols[symbol]}' for symbol in symbols)}}}"


# --- rows ---------------------------------------------------------------------------------------------------

Source = str | Callable[[GuardSource], str]
"""Source of a predicate, or a function that makes it."""


class Row(NamedTuple):
    """A guard of a program's calls.

    Attributes:
        cost: see `Cost`.
        holds: its predicate, which may raise `sizes.UNDEFINED`: that counts as a violation.
        message: describes a violation, for people. None: a condition of quick paths alone, no rule of the program.
        quick: what quick paths ask in place of `holds`; None: `holds`; empty: the program has no quick path.
        stricter: whether `quick` also rejects calls for which the row holds. It never admits others.
        held: what quick paths ask, without `prepare`, where the module's tensors are known to be those of the load; as
            strict as `quick` or stricter. None: as elsewhere; empty: no such path.
        prepare: makes lines before it, which bind variables.
        needs: its precondition.
        ends: the precondition that a violation ends, as it ends the rows of its subject that follow.
        subject: name of what it is about.
        error: class of the error of a violation; `CallInvalid` is raised with all violations.
    """

    cost: Cost
    holds: Source
    message: str | Callable[[Call], str] | None
    quick: Source | None = None
    stricter: bool = False
    held: Source | None = None
    prepare: Callable[[GuardSource], list[str]] | None = None
    needs: Gate | None = None
    ends: Gate | None = None
    subject: str = ""
    error: type[AotExportError] = CallInvalid

    def words(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str:
        """Return the violation of a call in words."""
        return self.message(Call(inputs, symbols)) if callable(self.message) else str(self.message)


def _text(source: GuardSource, predicate: Source) -> str:
    return predicate(source) if callable(predicate) else predicate


def quick_lines(source: GuardSource, rows: Sequence[Row], turn_away: str, *, is_held: bool = False) -> list[str] | None:
    """Return lines that run to their end for calls that fit, cheap predicates first; None: a row is not quick.

    `turn_away` is the statement for other calls, and for those that only `GuardTable` admits; `is_held`: whether the
    module's tensors are known.
    """
    lines: list[str] = []
    for row in sorted(rows, key=lambda row: COSTS.index(row.cost)):
        held = row.held if is_held else None
        lines += row.prepare(source) if row.prepare is not None and held is None else []
        predicate = _text(source, held if held is not None else row.holds if row.quick is None else row.quick)
        if not predicate:
            return None
        lines += [] if predicate == "True" else [f"if not ({predicate}): break"]
    lines = ["try:", *_indented([*lines, "fits = True"]), f"except {source.constant(sizes.UNDEFINED)}: break"]
    # What is turned away to may run code of the caller, whose errors are none of the predicates': it is outside.
    return ["for fits in (False,):", *_indented(lines), f"if not fits: {turn_away}"]


class GuardTable:
    """Rows about the inputs of a program."""

    def __init__(self, stages: Sequence[Sequence[Row]], count: int, known: Sequence[str] = ()) -> None:
        """Prepare rows of `count` inputs, by stages: each is asked of calls that fit the ones before it.

        `known`: symbols whose values are known before.
        """
        self.stages = stages
        self._inputs = "".join(f"{input_name(index)}, " for index in range(count))
        self._known = known

    def check(self, inputs: list[Any], symbols: dict[str, int]) -> list[str]:
        """Return one sentence per violation; `inputs` get the state tensors, `symbols` those that are not known.

        Raises:
            AotExportError: the first violation of a row whose error is not `CallInvalid`, if nothing else is violated.
        """
        found: list[str] = []
        for row in self.violations(inputs, symbols):
            if row.error is CallInvalid:
                found.append(row.words(inputs, symbols))
            elif not found:
                raise row.error(row.words(inputs, symbols))
        return found

    def first(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return the first violation in words; None: there is none."""
        return next((row.words(inputs, symbols) for row in self.violations(inputs, symbols)), None)

    @cached_property
    def violations(self) -> Callable[[list[Any], Mapping[str, int]], Iterator[Row]]:
        """A function that yields the violated rows, in order, without those whose preconditions do not hold."""
        source = GuardSource(symbols={symbol: f"s{number}" for number, symbol in enumerate(self._known)})
        lines = [f"{self._inputs}= inputs"] if self._inputs else []
        lines += [f"{name} = symbols[{source.constant(symbol)}]" for symbol, name in source.symbols.items()]
        lines.append("fits = has_ranks = has_symbols = True")
        for stage in self.stages:
            for _, about_one in groupby(stage, key=lambda row: row.subject):
                lines += _asked(source, about_one)
            lines.append("if not fits: return")
        return define("violations", "inputs, symbols", [*lines, "yield from ()"], source.scope, "guards in words")


def _asked(source: GuardSource, rows: Iterable[Row]) -> list[str]:
    """Return source that yields those rows about one subject whose preconditions hold, and that are violated."""
    lines: list[str] = []
    for row in rows:
        asked = row.prepare(source) if row.prepare is not None else []
        holds = "True" if row.message is None else _text(source, row.holds)
        if holds != "True":
            if row.cost == "sizes" and source.symbols:
                asked += [f"try: holds = {holds}", f"except {source.constant(sizes.UNDEFINED)}: holds = False"]
                holds = "holds"
            asked += [f"if not ({holds}):", "    fits = False", f"    yield {source.constant(row)}"]
            asked += [] if row.ends is None else [f"    has_{row.ends} = False", "    break"]
        if row.needs is not None and asked:
            asked = [f"if has_ranks and has_{row.needs}:", *_indented(asked)]
        lines += asked
    return ["for _ in '1':", *_indented(lines)] if lines else []


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
