"""Calls that are run as one: joined along an axis, split again, where this is shown to change no answer. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.results import VectorResult, least_tolerance
from aotexport_runtime.errors import AotExportError
from aotexport_runtime.rows.analysis import dependence, row_axes
from aotexport_runtime.rows.padding import dependence_on_padding
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.serving.interface import BatchAxes, Lengths, interface_of, served
from aotexport_runtime.values.compare import Observed, compare
from aotexport_runtime.values.tensors import is_torch_tensor

log = logging.getLogger("aotexport_runtime")

REFUSALS = (AotExportError, RuntimeError, ValueError, IndexError)
"""What a call that is made of a recorded one may raise."""

Values = list[Any]
"""A tensor, array or integer per input of an `Interface`."""


class AnyProgram:
    """The program of `forward` that a servable calls, by torch or by ONNX Runtime; one thread at a time calls it.

    Attributes:
        bundle: which it is of.
        target: what runs it, see `load`.
        name: its name.
        programs: the program and its variants that take as few inputs, each with its own of `interface.choices`.
        variants: their names.
        interface: its named inputs and outputs.
        adapters: names of the adapters that calls may ask for.
        least: the error that values may have at least, see `compare`.
        ran: when the engine began and ended the last call of `run_together`, by `time.monotonic`.
    """

    adapters: tuple[str, ...] = ()
    least: float = 0.0
    ran: tuple[float, float] = (0.0, 0.0)

    def __init__(self, bundle: Bundle, variants: list[str], target: str) -> None:
        """Read the interface of a program, one of its `variants`; `NotSupported`: clients cannot call it."""
        self.bundle = bundle
        self.target = target
        self.programs = served(map(bundle.program, variants))
        self.variants = [program.name for program in self.programs]
        self.name = self.variants[0]
        self.interface = interface_of(self.programs)

    @property
    def recorded_calls(self) -> list[VectorEntry]:
        """Recorded calls of the program and its variants."""
        return [entry for entry in self.bundle.manifest.testvectors if entry.program in self.variants]

    @property
    def engine(self) -> str:
        """What serves its calls first."""
        return self.target

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        """Return a tensor, array or number per output of the interface.

        Args:
            values: borrowed; a tensor that the model writes to is changed, as in eager execution.
            choice: index of the program whose strings the call has, see `Interface.choice`.

        Raises:
            CallInvalid: the call does not fit the program.
            ValueError: ONNX Runtime refuses a value, such as an index out of range.
        """
        raise NotImplementedError

    def timed(self, values: Values, choice: int) -> list[Any]:
        """`run`, and note in `ran` when."""
        began = time.monotonic()
        outputs = self.run(values, choice)
        self.ran = (began, time.monotonic())
        return outputs

    def values_of(self, entry: VectorEntry) -> Values:
        """Return the arguments of a recorded call."""
        raise NotImplementedError

    def run_recorded(self) -> Iterator[tuple[Values, VectorResult]]:
        """Run the recorded calls; yield their arguments and results; `NotSupported`: one changes the module's state."""
        raise NotImplementedError

    def applying(self, adapter: str | None) -> AbstractContextManager[None]:
        """Return a context in which calls of this thread apply an adapter; None: none, as outside of it."""
        return nullcontext()

    def rounded(self, array: np.ndarray[Any, Any], dtype: str) -> Any:
        """Return a float32 array as a value of a dtype that numpy lacks."""
        raise NotImplementedError


def result_of(
    bundle: Bundle, target: str, least: float, entry: VectorEntry, vector: Vector, expected: Observed, got: Observed
) -> VectorResult:
    """Return the result of a recorded call that was run again; `least`: see `AnyProgram`."""
    least = max(least, least_tolerance(bundle, entry.program, target))
    differences = compare(expected, got, least=least, eager_errors=vector.eager_errors)
    return VectorResult(entry.program, entry.name, target, differences)


def _observed(outputs: Sequence[Any]) -> Observed:
    named = {str(index): output for index, output in enumerate(outputs)}
    facts = {name: f"{value.dtype}{list(value.shape)}" for name, value in named.items()}
    return Observed(facts, {name: value.reshape(-1) for name, value in named.items()})


def run_together(
    program: AnyProgram, calls: Sequence[Values], axes: BatchAxes | None, choice: int = 0
) -> list[list[Any]]:
    """Return the outputs of each of several calls: run as one along `axes`, or each alone; see `AnyProgram.run`.

    With axes, calls are alike in all but the size of the batch, and the length that is padded with zeros at its end.
    """
    if axes is None or len(calls) == 1:
        return [program.timed(values, choice) for values in calls]
    if axes.padded is not None:
        return _run_padded(program, calls, axes, axes.padded, choice)
    joined = [_concatenated(values, axis) for values, axis in zip(zip(*calls, strict=True), axes.inputs, strict=True)]
    ends = list(itertools.accumulate(values[0].shape[axes.inputs[0]] for values in calls))
    outputs = program.timed(joined, choice)
    return [
        [_part(output, axis, begin, end) for output, axis in zip(outputs, axes.outputs, strict=True)]
        for begin, end in itertools.pairwise([0, *ends])
    ]


def _run_padded(
    program: AnyProgram, calls: Sequence[Values], axes: BatchAxes, padded: Lengths, choice: int
) -> list[list[Any]]:
    lengths = [_length(values, padded) for values in calls]
    whole = [
        [_extended(value, axis, max(lengths)) for value, axis in zip(values, padded.inputs, strict=True)]
        for values in calls
    ]
    results = run_together(program, whole, dataclasses.replace(axes, padded=None), choice)
    return [
        [
            output if axis is None else _part(output, axis, 0, length)
            for output, axis in zip(outputs, padded.outputs, strict=True)
        ]
        for outputs, length in zip(results, lengths, strict=True)
    ]


def _extended(value: Any, axis: int | None, length: int) -> Any:
    """Return a value with zeros at the end of an axis, so that it is as long."""
    if axis is None or value.shape[axis] == length:
        return value
    shape = (*value.shape[:axis], length - value.shape[axis], *value.shape[axis + 1 :])
    more = value.new_zeros(shape) if is_torch_tensor(value) else np.zeros(shape, value.dtype)
    return _concatenated([value, more], axis)


def _concatenated(values: Sequence[Any], axis: int) -> Any:
    if not is_torch_tensor(values[0]):
        return np.concatenate(values, axis=axis)
    import torch

    return torch.cat(list(values), dim=axis)


def _part(value: Any, axis: int, begin: int, end: int | None) -> Any:
    return value[(slice(None),) * axis + (slice(begin, end),)]


def batch_of(
    program: AnyProgram, recorded: Sequence[Values], choice: int, most: int, pad: str | None = None
) -> tuple[BatchAxes | None, str]:
    """Return the first axes along which joined calls give what each gives alone, and why those before it do not.

    The forward graph shows that no row knows of another (`rows.dependence`). Calls made of the `recorded` ones are then
    joined to batches of at most `most`, and compared with each alone: what a graph means is not all that may be wrong.
    `pad` names a length along which calls are padded where that is shown and tried in the same way.
    """
    interface, bundle, reasons = program.interface, program.bundle, list[str]()
    records = [
        bundle.program(name)
        for name, each in zip(program.variants, interface.choices, strict=True)
        if each == interface.choices[choice]
    ]
    for axes in interface.batches:
        rows = [(r, next(a for a in row_axes(r) if a.dimension.name == axes.name)) for r in records]
        found = (dependence(bundle.graph(record.name, record.forward.file), each) for record, each in rows)
        reason = next(filter(None, found), None)
        if reason is None and any(_agree(program, each, axes, choice, most) is False for each in recorded):
            reason = "joined calls gave other answers than each alone"
        if reason is None:
            axes, not_padded = _with_padding(program, records, recorded, axes, choice, most, pad)
            return axes, "; ".join([*reasons, *not_padded])
        reasons.append(f"not along `{axes.name}`: {reason}")
    where = ", in the program and each of its variants" if len(program.variants) > 1 else ""
    none = f"no dynamic size stands once in every input and output, and nowhere else{where}"
    return None, "; ".join(reasons) or none


def _with_padding(
    program: AnyProgram,
    records: Sequence[Program],
    recorded: Sequence[Values],
    axes: BatchAxes,
    choice: int,
    most: int,
    pad: str | None,
) -> tuple[BatchAxes, list[str]]:
    """Return `axes` with the length named `pad`, if calls of other lengths get what each gets alone; else why not."""
    lengths = next((each for each in program.interface.lengths if each.name == pad), None)
    if pad is None:
        return axes, []
    if lengths is None or pad == axes.name:
        there = ", ".join(f"`{each.name}`" for each in program.interface.lengths if each.name != axes.name) or "none"
        return axes, [f"not padded along `{pad}`: no such size stands at most once in each tensor; there are {there}"]
    reason = next(filter(None, (_padding(program.bundle, record, pad) for record in records)), None)
    if reason is not None:
        return axes, [f"not padded along `{pad}`: {reason}"]
    padded = dataclasses.replace(axes, padded=lengths)
    found = [_agree(program, values, padded, choice, most) for values in recorded]
    if False in found or True not in found:
        said = "padded calls gave other answers than each alone" if False in found else "no recorded call could be cut"
        return axes, [f"not padded along `{pad}`: {said}"]
    values = recorded[found.index(True)]
    masks = [
        index
        for index, axis in enumerate(lengths.inputs)
        if axis is not None and _agree(program, values, padded, choice, most, zeros=index) is False
    ]
    return dataclasses.replace(axes, padded=dataclasses.replace(lengths, masks=tuple(masks))), []


def _padding(bundle: Bundle, record: Program, pad: str) -> str | None:
    """Return why the length named `pad` cannot be padded, by the forward graph of a program."""
    interface = interface_of([record])
    lengths = next(each for each in interface.lengths if each.name == pad)
    return dependence_on_padding(
        bundle.graph(record.name, record.forward.file),
        next(each.symbol for each in record.dimensions if each.name == pad),
        {spec.index: axis for spec, axis in zip(interface.inputs, lengths.inputs, strict=True) if axis is not None},
        {spec.index: axis for spec, axis in zip(interface.outputs, lengths.outputs, strict=True)},
    )


def paces(program: AnyProgram, values: Values, axes: BatchAxes, choice: int, most: int) -> Iterator[tuple[int, float]]:
    """Yield sizes of joined batches, each twice the one before, and how long they take, for about two seconds in all.

    Their calls are the first rows of a recorded one.
    """
    one, end = _variations(values, dataclasses.replace(axes, padded=None), most)[-1], time.monotonic() + 2
    size = least = one[0].shape[axes.inputs[0]]
    while 0 < size <= min(most, axes.most or most):
        calls = [one] * (size // least)
        took_s = min(timeit.repeat(lambda: run_together(program, calls, axes, choice), number=1, repeat=2))  # noqa: B023
        yield size, took_s
        if time.monotonic() + 4 * took_s > end:
            return
        size *= 2


def _agree(
    program: AnyProgram, values: Values, axes: BatchAxes, choice: int, most: int, zeros: int | None = None
) -> bool | None:
    """Return whether calls made of a recorded one are answered as alone when they are joined; None: they cannot be.

    The batch is the greatest, or what is expected to run in two seconds. `zeros`: index of an input that has nothing
    else in one of them.
    """
    calls = _variations(values, axes, most)
    if zeros is not None:
        calls[-1][zeros] = calls[-1][zeros] * 0
    began = time.monotonic()
    answered = [(call, alone) for call in calls if (alone := _alone(program, call, choice)) is not None]
    sizes = [call[0].shape[axes.inputs[0]] for call, _ in answered]
    rows_in_2_s = int(2 * sum(sizes) / (time.monotonic() - began))
    all_of_them = max(most, len(calls))
    left, chosen = min(all_of_them, axes.most or all_of_them, max(rows_in_2_s, len(calls))), list[int]()
    for index in itertools.cycle(range(len(answered))):
        if left < min(sizes) or 0 in sizes:
            break
        if sizes[index] <= left:
            chosen.append(index)
            left -= sizes[index]
    if axes.padded is not None and len({_length(answered[index][0], axes.padded) for index in chosen}) < 2:
        return None
    try:
        joined = run_together(program, [answered[index][0] for index in chosen], axes, choice)
    except REFUSALS as error:
        log.debug("program %s: joined calls were not tried: %s", program.name, error)
        return None
    pairs = [(_observed(answered[index][1]), _observed(got)) for index, got in zip(chosen, joined, strict=True)]
    compared = [compare(*pair, least=program.least) for pair in pairs]
    return all(each.agrees for differences in compared for each in differences)


def _alone(program: AnyProgram, call: Values, choice: int) -> list[Any] | None:
    """Return the outputs of a call, whose values the model may write to copies of; None: it is refused."""
    try:
        return program.run([v.clone() if is_torch_tensor(v) else v.copy() for v in call], choice)
    except REFUSALS as error:
        log.debug("program %s: a call made of a recorded one is refused: %s", program.name, error)
        return None


def _variations(values: Values, axes: BatchAxes, most: int) -> list[Values]:
    """Return calls with some rows of a recorded one: the first, in reverse, and with floats of other magnitudes.

    Of lengths that are padded, most are cut, the first as far as may be, and the second is whole.
    """

    def varied(factor: float, part: float, change: Callable[[Any, int], Any]) -> Values:
        made = [change(value, axis) for value, axis in zip(values, axes.inputs, strict=True)]
        return _cut([value * factor if "float" in str(value.dtype) else value for value in made], axes, part)

    def first(value: Any, axis: int) -> Any:
        return _part(value, axis, 0, max(axes.least, 1))

    def some(value: Any, axis: int) -> Any:
        return _part(value, axis, 0, max(axes.least, most // 4, 1))

    def reverse(value: Any, axis: int) -> Any:
        return some(value.flip(axis) if is_torch_tensor(value) else np.flip(value, axis), axis)

    return [
        varied(-1, 0, first),
        varied(1, 1, some),
        varied(4, 1, first),
        varied(0.5, 0.7, reverse),
        varied(1, 0.5, first),
    ]


def _cut(values: Values, axes: BatchAxes, part: float) -> Values:
    """Return a call with a part of the length that is padded."""
    if axes.padded is None:
        return values
    length = max(int(_length(values, axes.padded) * part), axes.padded.least)
    return [
        value if axis is None else _part(value, axis, 0, length)
        for value, axis in zip(values, axes.padded.inputs, strict=True)
    ]


def _length(values: Values, padded: Lengths) -> int:
    return next(value.shape[axis] for value, axis in zip(values, padded.inputs, strict=True) if axis is not None)
