"""Compare what was observed of a call with what was recorded: tensors of torch, or arrays of numpy. No torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SAMPLE = 4096
"""Most elements of a tensor that are kept; its norms cover the rest."""

NORM, NORMS = " norm", " norms"
"""End the name of the 2-norm of a value that is kept in part, and of its 2-norm and greatest finite magnitude."""

TOLERANCES = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2, "bfloat16": 4e-2}
"""Largest accepted error per dtype, relative to the largest magnitude of the expected tensor."""

EAGER_ERRORS, MOST = 2.0, 1e-1
"""Factor of eager's own error that a value may be off, and the most that this allows: two values as far from the truth
as eager are up to twice as far from each other."""

_GRADIENT = "gradient of "


@dataclass
class Observed:
    """Observed facts and values.

    Attributes:
        values: by name, as flat tensors or arrays of at most `sample` elements, and `... norms` of those that had more.
        sample: most elements of a tensor to keep; None: as records without a number do, see `Vector.sample`.
    """

    facts: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    sample: int | None = SAMPLE


def kept(flat: Any, sample: int | None) -> Any:
    """Return a view of the elements of a flat value that are kept; `sample`: see `Observed`.

    Every second is dropped, as often as it takes: what is kept of a kept value is kept of the value.
    """
    count, step = len(flat), 1
    if sample is None:
        return flat[:: max(-(-count // SAMPLE), 1)]
    while -(-count // step) > sample:
        step *= 2
    return flat[::step]


def name_of_dtype(value: Any) -> str:
    """Return the dtype of a tensor or array by the format's name."""
    return str(value.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Difference:
    """A compared quantity.

    Attributes:
        error: largest absolute difference over the largest expected magnitude (for gradients at least a tenth of the
            call's largest gradient); infinite for facts that differ, and where one side alone is no number (NaN).
        absolute: largest absolute difference; infinite where `error` is.
        agrees: whether it is within tolerance.
        expected: for facts, that of eager; `got`: that of the bundle.
    """

    name: str
    error: float
    absolute: float
    agrees: bool
    expected: str = ""
    got: str = ""


def allowance(eager_error: float) -> float:
    """Return the error that a value may have if eager's own, of float32 beside float64, is `eager_error`."""
    return min(EAGER_ERRORS * eager_error, MOST)


def compare(
    expected: Observed, got: Observed, *, least: float = 0.0, eager_errors: Mapping[str, float] = {}
) -> list[Difference]:
    """Compare two observations: facts exactly, values within the tolerance of their dtype, or of `least`.

    `eager_errors`: by name of a value, eager's own error, which may widen the tolerance.
    """
    differences: list[Difference] = []
    for name in {**expected.facts, **got.facts}:
        # A bundle holds as leaves what are tensors with a history in eager, which have no gradients of their own.
        missing = "None" if _call_of_gradient(name) else "nothing"
        a, b = expected.facts.get(name, missing), got.facts.get(name, missing)
        if a != b:
            differences.append(Difference(name, float("inf"), float("inf"), False, a, b))
    # The least scale of a call's gradients is a tenth of the largest, whose rounding the others carry.
    floors: dict[str, float] = {}
    for name, value in expected.values.items():
        call = _call_of_gradient(name)
        if call and _is_float(value) and not name.endswith((NORM, NORMS)):
            floors[call] = max(floors.get(call, 0.0), 0.1 * _greatest(name, expected.values))
    for name, a in expected.values.items():
        b = got.values.get(name)
        if b is not None and b.shape == a.shape and b.dtype == a.dtype:
            floor = floors.get(_call_of_gradient(name), 0.0)
            # A norm has the tolerance of its tensor, though it is kept as float64.
            whole = expected.values.get(name.removesuffix(NORM).removesuffix(NORMS), a)
            own = TOLERANCES.get(name_of_dtype(whole if _is_float(whole) else a), 0.13)
            tolerance = max(least, own, allowance(eager_errors.get(name, 0.0)))
            scale = max(_greatest(name, expected.values), floor)
            differences.append(_compare_values(name, a, b, tolerance, scale))
    return differences


def _call_of_gradient(name: str) -> str:
    """Return the prefix of a gradient's name that identifies the call; empty: it is no gradient."""
    call, found, _ = name.partition(_GRADIENT)
    return call if found else ""


def _greatest(name: str, values: Mapping[str, Any]) -> float:
    """Return the greatest finite magnitude of a value, also of elements that are not kept."""
    norms = values.get(name + NORMS)
    if norms is not None:
        return float(norms[1])
    lib, elements = _float64(values[name])
    finite = elements[lib.isfinite(elements)]
    return float(lib.abs(finite).max()) if len(finite) else 0.0


def _is_float(value: Any) -> bool:
    return "float" in name_of_dtype(value)


def _float64(value: Any) -> tuple[Any, Any]:
    """Return the library of a value, numpy or torch, and the value as float64 where it is."""
    lib: Any = np if isinstance(value, np.ndarray) else importlib.import_module("torch")
    return lib, lib.asarray(value, dtype=lib.float64)


def _compare_values(name: str, expected: Any, got: Any, tolerance: float, scale: float) -> Difference:
    if not _is_float(expected):
        wrong = int((expected != got).sum())
        return Difference(name, float(wrong > 0), float(wrong), wrong == 0)
    (lib, a), (_, b) = _float64(expected), _float64(got)
    same = (a == b) | (lib.isnan(a) & lib.isnan(b))
    with np.errstate(invalid="ignore"):
        gap = lib.where(same, 0.0, lib.abs(a - b))
    # An error of NaN would be neither within a limit nor beyond it, and `max` would lose it.
    absolute = float(lib.nan_to_num(gap, nan=math.inf, posinf=math.inf).max()) if math.prod(gap.shape) else 0.0
    error = absolute / max(scale, 1e-6 if tolerance < 1e-6 else 1e-3)
    return Difference(name, error, absolute, bool(error <= tolerance))
