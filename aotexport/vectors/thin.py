"""Keep less of the recorded calls once they have verified the bundle: they would outweigh a small model."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from aotexport.eager.recorded_arguments import EXAMPLE, OTHER_SIZES, OTHER_VALUES, mostly_differ
from aotexport_runtime.bundle.weights import read_tensors
from aotexport_runtime.schema.codec import decode_record, encode_record
from aotexport_runtime.schema.manifest import Manifest, VectorEntry
from aotexport_runtime.schema.vectors import Vector, VectorInput, VectorPart
from aotexport_runtime.values.compare import NORMS, SAMPLE, kept
from aotexport_runtime.values.observe import sampled

_MOST_NBYTES = 256_000
_OF_WEIGHTS = 0.1
_LEAST_SAMPLE = 32
_HEADER_NBYTES = 80
"""Bytes of a tensor's entry in the header of its file, about."""

_MOST_EQUAL = 1 / 16
"""Part of an argument's floats that may be one value: more are padding, which no other call has."""

_LIKE, _SMALL = 32.0, 1e-3
"""Factor by which results of calls with other values may be larger or smaller than the example's, and the least of them
that counts."""

_USUAL = (EXAMPLE, OTHER_VALUES, OTHER_SIZES)
"""Calls of no special sizes."""

Call = tuple[Vector, dict[str, torch.Tensor]]


def thin_vectors(directory: Path, manifest: Manifest) -> Manifest:
    """Rewrite recorded calls with fewer elements of each value, until all take a tenth of the weights, or 256 kB.

    At least 32 elements of a value are kept, and its norms. Where arguments take more, calls with the user's own are
    left out if a call with other values of no special sizes stands for them. Returns the manifest with the calls that
    are left; the same object if no file has changed.
    """
    calls: dict[VectorEntry, Call] = {}
    for entry in manifest.testvectors:
        vector = decode_record((directory / entry.record).read_bytes(), Vector, where=entry.record)
        calls[entry] = vector, read_tensors((directory / entry.tensors).read_bytes(), where=entry.tensors)
    weights = {place.file for tensor in manifest.state for place in (tensor, *tensor.parts)}
    weights_nbytes = sum(file.nbytes for file in manifest.files if file.path in weights)
    most, sample = max(_MOST_NBYTES, int(_OF_WEIGHTS * weights_nbytes)), SAMPLE
    while sample > _LEAST_SAMPLE and sum(map(_nbytes, calls.values())) > most:
        sample //= 2
        calls = {entry: _thinned(*call, sample) for entry, call in calls.items()}
    left_out = _left_out(calls, sum(map(_nbytes, calls.values())) - most)
    for entry in left_out:
        (directory / entry.record).unlink()
        (directory / entry.tensors).unlink()
        del calls[entry]
    for entry, (vector, stored) in calls.items() if sample < SAMPLE else ():
        (directory / entry.record).write_bytes(encode_record(vector))
        save_file(stored, directory / entry.tensors)
    if sample == SAMPLE and not left_out:
        return manifest
    # What needs one call of a program takes the first.
    places = {entry.program: place for place, entry in reversed(list(enumerate(calls)))}
    ordered = sorted(calls, key=lambda entry: (places[entry.program], entry.name not in _USUAL))
    return msgspec.structs.replace(manifest, testvectors=tuple(ordered))


def _left_out(calls: Mapping[VectorEntry, Call], excess: int) -> list[VectorEntry]:
    """Return the calls to leave out so that the others take `excess` bytes less, the largest first."""
    found: list[VectorEntry] = []
    for entry in sorted((entry for entry in calls if entry.name == EXAMPLE), key=lambda entry: -_nbytes(calls[entry])):
        others = [calls[o] for o in calls if o.program == entry.program and o.name in _USUAL[1:]]
        if excess > 0 and not _is_special(calls[entry]) and any(_tells(other, calls[entry]) for other in others):
            found.append(entry)
            excess -= _nbytes(calls[entry])
    return found


def _is_special(call: Call) -> bool:
    """Return whether arguments of a call share memory, or are padded: others made of them are not."""
    vector, stored = call
    parts = [part for spec in vector.inputs for part in (spec, *spec.parts) if part.key]
    shares = len({part.key for part in parts}) < len(parts)
    return shares or any(not part.is_complex and _is_padded(part, stored[part.key]) for part in parts)


def _is_padded(part: VectorInput | VectorPart, span: torch.Tensor) -> bool:
    """Return whether floats that mostly differ have one value in many places, or in a whole row."""
    if not span.is_floating_point() or not mostly_differ(span):
        return False
    tensor = span.as_strided(part.shape, part.stride, part.offset)
    row = tensor.dim() > 1 and tensor.shape[-1] > 1 and bool((tensor == tensor[..., :1]).all(-1).any())
    return row or int(span.unique(return_counts=True)[1].max()) > _MOST_EQUAL * len(span)


def _tells(other: Call, example: Call) -> bool:
    """Return whether the results of a call are about as large as the example's: numbers, and none that hide others."""
    found, own = _sizes(other), _sizes(example)
    return all(size / _LIKE <= found.get(name, size) <= size * _LIKE for name, size in own.items() if isfinite(size))


def _sizes(call: Call) -> dict[str, float]:
    """Return the greatest magnitudes of results, one of all gradients; infinite: some are not finite."""
    vector, stored = call
    values = {name: stored[f"v{index}"] for index, name in enumerate(vector.values)}
    sizes = dict[str, float]()
    for name, value in values.items():
        if value.is_floating_point() and value.numel() and name + NORMS not in values:
            wide = value.to(torch.float64).abs()
            size = float(wide[-1] if name.endswith(NORMS) else wide.max()) if wide.isfinite().all() else inf
            what = "".join(name.removesuffix(NORMS).partition("gradient of ")[:2])
            sizes[what] = max(sizes.get(what, _SMALL), size)
    return sizes


def _nbytes(call: Call) -> int:
    vector, stored = call
    return len(encode_record(vector)) + sum(tensor.nbytes + _HEADER_NBYTES for tensor in stored.values())


def _thinned(vector: Vector, stored: dict[str, torch.Tensor], sample: int) -> Call:
    arguments = dict(stored)
    values = {name: arguments.pop(f"v{index}") for index, name in enumerate(vector.values)}
    thin, errors = dict[str, torch.Tensor](), dict(vector.eager_errors)
    for name, value in values.items():
        if name.endswith(NORMS):
            thin[name] = value
        elif name + NORMS in values:
            thin[name] = kept(value, sample).contiguous().clone()
        else:
            thin |= sampled(name, value, sample)
            if name in errors and name + NORMS in thin:
                errors[name + NORMS] = errors[name]
    record = msgspec.structs.replace(vector, values=tuple(thin), sample=sample, eager_errors=errors)
    return record, {**arguments, **{f"v{index}": value for index, value in enumerate(thin.values())}}
