"""Arguments of recorded calls that are made instead of stored: floats by SplitMix64. No torch.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.schema.vectors import Vector, VectorInput
from aotexport_runtime.validate.arguments import span_end

_STEP, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_OF_ARGUMENT = 40
"""Bits of a number that tell the elements of one argument apart."""
_PART = 1 << 18


def generated_inputs(vector: Vector, program: Program) -> Iterator[tuple[VectorInput, str, np.ndarray[Any, Any]]]:
    """Yield each generated argument of a checked recorded call, its dtype, its elements; see `generated_floats`."""
    arguments = [spec for spec in program.inputs if not isinstance(spec, StateInput)]
    for place, (spec, argument) in enumerate(zip(vector.inputs, arguments, strict=True)):
        if spec.quantiles and isinstance(argument, ArgumentInput):
            count = span_end(spec.shape, spec.stride, spec.offset)
            dtype = argument.meta.dtype
            yield spec, dtype, generated_floats(vector.seed, place, count, spec.quantiles, dtype)


def generated_floats(seed: int, place: int, count: int, quantiles: Sequence[float], dtype: str) -> np.ndarray[Any, Any]:
    """Return floats whose distribution has these quantiles, for an argument of a recorded call.

    Args:
        seed: of the recorded call.
        place: of the argument among those of the call.
        count: how many.
        quantiles: 2 or more, at equal steps of probability, from the least value to the greatest.
        dtype: of the argument. Floats are float64 for that dtype, and float32 for all others, to be rounded to.
    """
    made = np.empty(count, np.float64 if dtype == "float64" else np.float32)
    steps = np.asarray(quantiles, np.float64)
    for start in range(0, count, _PART):
        stop = min(start + _PART, count)
        numbers = np.arange(start + 1, stop + 1, dtype=np.uint64) + np.uint64(place << _OF_ARGUMENT)
        places = _uniform(numbers * _STEP + np.uint64(seed)) * (len(steps) - 1)
        below = places.astype(np.int64)
        with np.errstate(over="ignore", invalid="ignore"):  # Quantiles of a hostile bundle may be the greatest floats.
            made[start:stop] = steps[below] + (places - below) * (steps[below + 1] - steps[below])
    return made


def _uniform(mixed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a float64 from 0 to 1, 1 excluded, per 64-bit number."""
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
