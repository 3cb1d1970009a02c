"""Recorded calls: arguments, and what eager gave, as a bundle stores them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aotexport_runtime.bundle.generated import generated_inputs
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import read_tensors
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.vectors import Vector, spans
from aotexport_runtime.validate.vector import check_stored
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.observe import Observation


def recorded_observation(vector: Vector, stored: Mapping[str, torch.Tensor]) -> Observation:
    """Return the observation of eager execution in a recorded call."""
    values = {name: stored[f"v{index}"] for index, name in enumerate(vector.values)}
    return Observation(dict(vector.facts), values, vector.sample)


def read_vector(bundle: Bundle, entry: VectorEntry) -> tuple[Vector, dict[str, torch.Tensor]]:
    """Return a recorded call with its stored tensors.

    Raises:
        BundleInvalid: the record is invalid, or does not fit the stored tensors.
    """
    vector = bundle.vector(entry)
    stored = read_tensors(bundle.bytes_of(entry.tensors), where=entry.tensors)
    check_stored(vector, {key: tensor.shape for key, tensor in stored.items()}, Place(entry.record))
    for spec, dtype, made in generated_inputs(vector, bundle.program(entry.program)):
        stored[spec.key] = torch.from_numpy(made).to(dtypes.dtype(dtype))
    for key in {part.key for spec in vector.inputs for part in spans(spec) if part.is_complex}:
        stored[key] = torch.view_as_complex(stored[key])
    return vector, stored
