"""Subjects of guards of arguments: tensors, dynamic integers, symbols and truths over them. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aotexport_runtime.guards.rule import Call, input_name
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension, Size
from aotexport_runtime.values import sizes
from aotexport_runtime.values.subclasses import Form, is_wrapper, parts


@dataclass(frozen=True, kw_only=True)
class ArgumentFacts:
    """Facts for guards of arguments.

    Attributes:
        program: its record.
        device_types: types of devices that arguments may be on, the expected one first; empty: that of capture.
        forms: structure per input that is a tensor subclass.
    """

    program: Program
    device_types: tuple[str, ...] = ()
    forms: Mapping[int, Form] = field(default_factory=dict[int, Form])

    def shape(self, shape: Sequence[Size]) -> str:
        """Return a shape for people."""
        return "[" + ", ".join(sizes.describe(size, self.names) for size in shape) + "]"

    @property
    def names(self) -> dict[str, str]:
        """The user's name per symbol."""
        return {dimension.symbol: dimension.name for dimension in self.program.dimensions}


@dataclass(frozen=True)
class Argument:
    """A tensor of the call."""

    index: int
    spec: ArgumentInput
    facts: ArgumentFacts

    @property
    def variable(self) -> str:
        """Name of its variable."""
        return input_name(self.index)

    @property
    def form(self) -> Form | None:
        """Structure of a tensor subclass."""
        return self.facts.forms.get(self.index)

    @property
    def expected_shape(self) -> str:
        """Its shape at capture, in words."""
        return self.facts.shape(self.spec.meta.shape)

    @property
    def is_static(self) -> bool:
        """Whether all its sizes are those of the example."""
        return all(isinstance(size, int) for size in self.spec.meta.shape)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Types of devices that it may be on."""
        return self.facts.device_types or (self.spec.meta.device,)

    def difference(self, leaf: Any) -> str | None:
        """Return how a tensor differs in its structure; None: it does not."""
        if self.form is None:
            got = type(leaf).__name__
            return f"expected a plain tensor, as at capture, got a `{got}`" if is_wrapper(leaf) else None
        reason = self.form.why_not(leaf)
        if reason is not None:
            return reason
        for part, meta in zip(parts(leaf), self.spec.parts, strict=True):
            fits = name_of(part.dtype) == meta.dtype and part.dim() == len(meta.shape)
            sized = zip(part.shape, meta.shape, strict=False)
            if not fits or any(isinstance(size, int) and n != size for n, size in sized):
                got = f"{name_of(part.dtype)}{list(part.shape)}"
                return f"expected to be made of {meta.dtype}{self.facts.shape(meta.shape)}, got {got}"
        return None

    def unequal_axis(self, call: Call) -> str:
        """Return which size is wrong, in words."""
        shape, names = call.inputs[self.index].shape, self.facts.names
        for axis, expected in enumerate(self.spec.meta.shape):
            wanted = value_of(expected, call.symbols)
            if shape[axis] != wanted:
                name = "" if isinstance(expected, int) else f" ({sizes.describe(expected, names)} = {wanted})"
                return f"got {list(shape)} at axis {axis}{name}{self._way_out(axis)}"
        raise AssertionError("no size is wrong")

    def _way_out(self, axis: int) -> str:
        """Return how an export lets this axis vary, for a tensor whose sizes are all the example's."""
        if not self.is_static:
            return ""
        option = f"--dynamic {json.dumps(f'{self.spec.path}:{axis}=NAME')}"
        return f"; its sizes are fixed as in the example, an export with {option} lets this one vary"


@dataclass(frozen=True)
class IntegerArgument:
    """A dynamic integer of the call."""

    index: int
    spec: SizeInput


@dataclass(frozen=True)
class Symbol:
    """A symbol, with the place of the call that has its value."""

    number: int
    record: Dimension
    facts: ArgumentFacts

    @property
    def name(self) -> str:
        """Name of its variable."""
        return f"s{self.number}"

    @property
    def is_argument(self) -> bool:
        """Whether it is a dynamic integer itself."""
        return isinstance(self.facts.program.inputs[self.record.input_index], SizeInput)

    @property
    def where(self) -> str:
        """Its place, in words."""
        spec = self.facts.program.inputs[self.record.input_index]
        if isinstance(spec, SizeInput):
            return f"`{spec.path}`"
        return f"`{spec.path if isinstance(spec, ArgumentInput) else spec.name}`: size {self.record.axis}"

    def size(self, call: Call) -> int:
        """Return the size in a call."""
        value = call.inputs[self.record.input_index]
        return value if self.is_argument else value.shape[self.record.axis]


def name_of(value: Any) -> str:
    """Return the format's name of a dtype or layout (`torch.float32`: `float32`)."""
    return str(value).removeprefix("torch.")


def value_of(size: Size, symbols: Mapping[str, int]) -> int | None:
    """Return the value of `size`; None: it has none for these symbols (it divides by zero)."""
    try:
        return sizes.evaluate(size, symbols)
    except sizes.UNDEFINED:
        return None


def same_layout(shape: Sequence[int], actual: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Return whether two strides address the same elements: they may differ along axes of at most one element."""
    if len(shape) != len(expected):
        return False
    return 0 in shape or all(size <= 1 or a == b for size, a, b in zip(shape, actual, expected, strict=True))


def arguments(facts: ArgumentFacts) -> list[Argument]:
    """Return the tensors of a call."""
    inputs = enumerate(facts.program.inputs)
    return [Argument(index, spec, facts) for index, spec in inputs if isinstance(spec, ArgumentInput)]


def integer_arguments(facts: ArgumentFacts) -> list[IntegerArgument]:
    """Return the dynamic integers of a call."""
    inputs = enumerate(facts.program.inputs)
    return [IntegerArgument(index, spec) for index, spec in inputs if isinstance(spec, SizeInput)]


def symbols(facts: ArgumentFacts) -> Iterator[Symbol]:
    """Return the symbols of a program."""
    return (Symbol(number, record, facts) for number, record in enumerate(facts.program.dimensions))
