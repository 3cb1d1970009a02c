"""Calls that are run as one: joined along an axis, split again, and the proof that this changes no answer. No torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import AotExportError
from aotexport_runtime.serving.interface import BatchAxes, Interface
from aotexport_runtime.values.tensors import is_torch_tensor

log = logging.getLogger("aotexport_runtime")

Values = list[Any]
"""A tensor, array or integer per input of an `Interface`."""


class AnyProgram(Protocol):
    """The program that a servable calls, by torch or by ONNX Runtime.

    Attributes:
        name: its name.
        interface: its named inputs and outputs.
        adapters: names of the adapters that calls may ask for.
    """

    name: str
    interface: Interface
    adapters: tuple[str, ...]

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        """Return a tensor, array or number per output of the interface; see `Interface.choice`."""
        ...

    def applying(self, adapter: str | None) -> AbstractContextManager[None]:
        """Return a context in which calls of this thread apply an adapter."""
        ...

    def check_recorded_calls(self, bundle: Bundle) -> list[Values]:
        """Run the recorded calls, compare with eager's answers, and return their arguments."""
        ...

    def recorded_values(self, bundle: Bundle) -> Values | None:
        """Return the arguments of a recorded call; None: there is none."""
        ...

    def agree(self, expected: Sequence[Any], got: Sequence[Any]) -> bool:
        """Return whether outputs are equal within the tolerance of their dtype."""
        ...

    def rounded(self, array: np.ndarray[Any, Any], dtype: str) -> Any:
        """Return a float32 array as a value of a dtype that numpy lacks."""
        ...


def run_together(
    program: AnyProgram, calls: Sequence[Values], axes: BatchAxes | None, choice: int = 0
) -> list[list[Any]]:
    """Return the outputs of each of several calls: run as one along `axes`, or each alone.

    Args:
        program: the program.
        calls: alike in all but the size of the batch, if there is more than one and there are axes.
        axes: where calls are joined; None: nowhere.
        choice: index of the program that has the strings of the calls, see `Interface.choice`.

    Raises:
        CallInvalid: a call, or the joined one, does not fit the program.
    """
    if axes is None or len(calls) == 1:
        return [program.run(values, choice) for values in calls]
    joined = [_concatenated(values, axis) for values, axis in zip(zip(*calls, strict=True), axes.inputs, strict=True)]
    ends = list(itertools.accumulate(values[0].shape[axes.inputs[0]] for values in calls))
    outputs = program.run(joined, choice)
    return [
        [_part(output, axis, begin, end) for output, axis in zip(outputs, axes.outputs, strict=True)]
        for begin, end in itertools.pairwise([0, *ends])
    ]


def _concatenated(values: Sequence[Any], axis: int) -> Any:
    if not is_torch_tensor(values[0]):
        return np.concatenate(values, axis=axis)
    import torch

    return torch.cat(list(values), dim=axis)


def _part(value: Any, axis: int, begin: int, end: int | None) -> Any:
    return value[(slice(None),) * axis + (slice(begin, end),)]


def proven_batch(program: AnyProgram, recorded: Sequence[Values], choice: int) -> BatchAxes | None:
    """Return the first axes along which joined calls give what each gives alone; None: there are none.

    Sizes tell where calls could be joined; only the values tell whether rows of a batch know of each other, as those of
    a sequence do.

    Args:
        program: the program.
        recorded: arguments of its recorded calls.
        choice: index of the program that has the strings of the calls.
    """
    for axes in program.interface.batches:
        pairs = [pair for values in recorded for pair in _pairs(values, axes)]
        verdicts = [verdict for pair in pairs if (verdict := _agrees(program, pair, axes, choice)) is not None]
        if verdicts and all(verdicts):
            return axes
        log.info(
            "program %s: calls are not joined along `%s`: %s",
            program.name,
            axes.name,
            "answers would differ" if verdicts else "no recorded calls show whether answers would differ",
        )
    return None


def _pairs(values: Values, axes: BatchAxes) -> list[tuple[Values, Values]]:
    """Return two calls each that differ: a recorded one and its mirror image, and the two parts of its batch."""
    if any(isinstance(value, int) for value in values):
        return []
    mirrored = [_mirrored(value, axis) for value, axis in zip(values, axes.inputs, strict=True)]
    pairs = [(values, mirrored)]
    if values[0].shape[axes.inputs[0]] > 1:
        heads, tails = (
            [_part(value, axis, *ends) for value, axis in zip(values, axes.inputs, strict=True)]
            for ends in ((0, 1), (1, None))
        )
        pairs.append((heads, tails))
    return [(one, other) for one, other in pairs if not _same(one, other)]


def _mirrored(value: Any, axis: int) -> Any:
    """Return a value with its axes but `axis` reversed, and floats halved, so that sums differ as well."""
    others = tuple(other for other in range(value.ndim) if other != axis)
    mirrored = value.flip(others) if is_torch_tensor(value) else np.flip(value, others)
    return mirrored / 2 if "float" in str(value.dtype) else mirrored


def _same(one: Values, other: Values) -> bool:
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(one, other, strict=True))


def _agrees(program: AnyProgram, pair: tuple[Values, Values], axes: BatchAxes, choice: int) -> bool | None:
    """Return whether two calls have the answers that they have when they are joined; None: a call does not fit."""
    try:
        alone = [program.run(_copied(values), choice) for values in pair]
        joined = run_together(program, pair, axes, choice)
    except (AotExportError, RuntimeError, ValueError, IndexError) as error:
        log.debug("program %s: no verdict on joined calls: %s", program.name, error)
        return None
    return all(program.agree(expected, got) for expected, got in zip(alone, joined, strict=True))


def _copied(values: Values) -> Values:
    """Return copies, which the model may write to."""
    return [value.clone() if is_torch_tensor(value) else value.copy() for value in values]
