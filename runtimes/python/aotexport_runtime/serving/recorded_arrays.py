"""Recorded calls as arrays of numpy, and the comparison with eager's answers. No torch.

The counterpart of `commands.self_test` for inference: outputs by value, dtype and shape; no gradients, no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from aotexport_runtime.bundle.generated import generated_inputs
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid, NotSupported, Place, SelfTestFailed
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.serving.joining import Values
from aotexport_runtime.validate import check_stored
from aotexport_runtime.values.trees import leaves

Array = np.ndarray[Any, Any]

TOLERANCES = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2}
"""Largest accepted error per dtype, as in `values.compare`."""
COARSER = TOLERANCES | {"bfloat16": 4e-2}
"""The same with what numpy lacks, and programs compute in."""
_EAGER_ERRORS, _MOST = 2.0, 1e-1
_SAMPLE = 4096


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A recorded call: its record, an array or integer per argument, and the arrays that were observed, by name."""

    vector: Vector
    values: Values
    stored: Mapping[str, Array]


def read_call(bundle: Bundle, entry: VectorEntry) -> RecordedCall:
    """Return a recorded call.

    Raises:
        BundleInvalid: the record is invalid, or does not fit the stored arrays.
        NotSupported: numpy lacks a dtype.
    """
    vector = bundle.vector(entry)
    try:
        arrays = load(bundle.bytes_of(entry.tensors))
    except SafetensorError as error:
        raise BundleInvalid(
            f"not a safetensors file: {error}", where=entry.tensors, check="tensor-stored/safetensors"
        ) from None
    except KeyError as error:
        raise NotSupported(f"recorded call `{entry.name}` has values of {error}, which numpy lacks") from None
    check_stored(vector, {key: array.shape for key, array in arrays.items()}, Place(entry.record))
    for spec, dtype, made in generated_inputs(vector, bundle.program(entry.program)):
        if dtype == "bfloat16":
            raise NotSupported(f"recorded call `{entry.name}` has values of bfloat16, which numpy lacks")
        arrays[spec.key] = made.astype(dtype)
    values: Values = []
    for spec in vector.inputs:
        values.append(_spanned(arrays, spec) if spec.value is None else spec.value)
    stored = {name: arrays[f"v{index}"] for index, name in enumerate(vector.values)}
    return RecordedCall(vector=vector, values=values, stored=stored)


def _spanned(arrays: Mapping[str, Array], spec: Any) -> Array:
    """Return the argument as an array of its own; its span lies within the stored array."""
    base = arrays[spec.key] if spec.key in arrays else np.empty(0, np.float32)
    steps = [step * base.itemsize for step in spec.stride]
    return np.lib.stride_tricks.as_strided(base[spec.offset :], spec.shape, steps, writeable=False).copy()


def check_answers(bundle: Bundle, entry: VectorEntry, run: Callable[[Values], list[Any]]) -> Values:
    """Run a recorded call, compare with what eager gave (`SelfTestFailed`), and return its arguments."""
    call, program = read_call(bundle, entry), bundle.program(entry.program)
    least = _coarsest(bundle, entry.program)
    outputs = run([value if isinstance(value, int) else value.copy() for value in call.values])
    paths = [path for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]
    faults: list[str] = []
    for path, output in zip(paths, outputs, strict=True):
        fault = _fault(call, f"call 0: {path}", output, least)
        faults += [f"{entry.program}/{entry.name} {path}: {fault}"] if fault else []
    if faults:
        raise SelfTestFailed("the bundle disagrees with eager execution:\n" + "\n".join(faults))
    return call.values


def _fault(call: RecordedCall, name: str, output: Any, least: float) -> str:
    """Return how an output differs from the recorded one; empty: it does not."""
    fact = call.vector.facts.get(name, "nothing")
    if isinstance(output, int):
        return "" if fact == repr(output) else f"expected {fact}, got {output}"
    got = f"{output.dtype.name}{list(output.shape)}"
    if name not in call.stored or fact.partition(" strides")[0] != got:
        return f"expected {fact}, got {got}"
    expected, kept = call.stored[name], kept_elements(output.reshape(-1), call.vector.sample)
    if expected.shape != kept.shape:
        return f"expected {expected.size} recorded elements, got {kept.size}"
    norms = call.stored.get(f"{name} norms")
    allowed = min(_EAGER_ERRORS * call.vector.eager_errors.get(name, 0.0), _MOST)
    tolerance = max(least, TOLERANCES.get(output.dtype.name, 0.0), allowed)
    error = error_of(expected, kept, None if norms is None else float(norms[1]))
    if not error <= tolerance:
        return f"error {error:.3g}, tolerance {tolerance:.3g}"
    if norms is None:
        return ""
    norm, wanted = _norm(output), float(norms[0])
    # A norm that is infinite or no number has to be the same.
    if not np.isclose(norm, wanted, rtol=max(tolerance, 1e-6), atol=0.0, equal_nan=True):
        return f"its norm is {abs(norm - wanted):.3g} off"
    return ""


def _norm(array: Array) -> float:
    return float(np.linalg.norm(array.reshape(-1).astype(np.float64)))


def kept_elements(flat: Array, sample: int | None) -> Array:
    """Return the elements that a record keeps; see `values.observe.sampled`."""
    most, step = _SAMPLE if sample is None else sample, 1
    if sample is None:
        return flat[:: max(-(-flat.size // most), 1)]
    while -(-flat.size // step) > most:
        step *= 2
    return flat[::step]


def error_of(expected: Array, got: Array, greatest: float | None = None) -> float:
    """Return the largest difference of two arrays, relative to the greatest magnitude that is expected.

    Values that are no floats have to be equal. The greatest magnitude is that of `expected`, unless it is given.
    """
    if expected.dtype.kind != "f":
        return 0.0 if bool((expected == got).all()) else math.inf
    a, b = expected.astype(np.float64), got.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        gap = np.nan_to_num(np.where(same, 0.0, np.abs(a - b)), nan=math.inf, posinf=math.inf)
    finite = np.abs(a[np.isfinite(a)])
    scale = greatest if greatest is not None else float(finite.max(initial=0.0))
    return float(gap.max(initial=0.0)) / max(scale, 1e-3)


def _coarsest(bundle: Bundle, program: str) -> float:
    """Return the tolerance of the coarsest dtype that the program computes in."""
    nodes = bundle.graph(program, bundle.program(program).forward.file).nodes
    return max((COARSER.get(node.meta.dtype, 0.0) for node in nodes if isinstance(node.meta, TensorMeta)), default=0.0)
