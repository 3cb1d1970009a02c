"""Recorded calls: arguments, and what eager gave, as a bundle stores them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from aotexport_runtime.bundle.generated import generated_inputs
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import read_tensors
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.validate import check_vector
from aotexport_runtime.validate.bounds import span_end
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.observe import Observation, spans

_MOST_ELEMENTS = 1 << 28
"""Most elements of an argument that repeats stored ones by a stride of 0."""


def recorded_observation(vector: Vector, stored: Mapping[str, torch.Tensor]) -> Observation:
    """Return the observation of eager execution in a recorded call."""
    return Observation(dict(vector.facts), {name: stored[f"v{index}"] for index, name in enumerate(vector.values)})


def read_vector(bundle: Bundle, entry: VectorEntry) -> tuple[Vector, dict[str, torch.Tensor]]:
    """Return a recorded call with its stored tensors.

    Raises:
        BundleInvalid: the record is invalid, or does not fit the stored tensors.
    """
    vector = bundle.record(entry.record, Vector)
    check_vector(vector, bundle.program(entry.program), where=Place(entry.record))
    stored = read_tensors(bundle.bytes_of(entry.tensors), where=entry.tensors)
    for spec, dtype, made in generated_inputs(vector, bundle.program(entry.program)):
        stored[spec.key] = torch.from_numpy(made).to(dtypes.dtype(dtype))
    for spec in vector.inputs:
        for part in spans(spec):
            if span_end(part.shape, part.stride, part.offset) > _numel(stored, part.key):
                raise BundleInvalid(
                    f"argument {spec.path!r} reaches past the end of {part.key!r}",
                    where=entry.record,
                    code="vector-malformed",
                )
            if math.prod(part.shape) > max(_MOST_ELEMENTS, _numel(stored, part.key)):
                raise BundleInvalid(
                    f"argument {spec.path!r} repeats {part.key!r} too often",
                    where=entry.record,
                    code="vector-malformed",
                )
    for key in {part.key for spec in vector.inputs for part in spans(spec) if part.is_complex}:
        stored[key] = torch.view_as_complex(stored[key])
    missing = [name for index, name in enumerate(vector.values) if f"v{index}" not in stored]
    if missing:
        raise BundleInvalid(f"no tensor of {missing[0]!r}", where=entry.tensors, code="vector-malformed")
    return vector, stored


def _numel(stored: dict[str, torch.Tensor], key: str) -> int:
    return len(stored[key]) if key in stored else 0
