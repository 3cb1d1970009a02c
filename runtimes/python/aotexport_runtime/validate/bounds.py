"""Bounds and forms of values in every record: indices, names, text, spans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import INT64_MAX, MAX_AXES, bounds_of
from aotexport_runtime.schema.manifest import StoredPart

if TYPE_CHECKING:
    from aotexport_runtime.schema.vectors import VectorPart


def check_index(index: int, count: int, subject: str, check: str, where: Place) -> None:
    """Refuse an index outside `range(count)`; `subject` and `check` are for the error."""
    if not 0 <= index < count:
        raise where.invalid(f"{subject} is {index}, out of range({count})", check)


def check_unique(names: Iterable[object], subject: str, check: str, where: Place) -> None:
    """Refuse a name that occurs twice."""
    twice = first_twice(names)
    if twice is not None:
        raise where.invalid(f"{subject} {twice[:80]!r} occurs twice", check)


def first_twice(names: Iterable[object]) -> str | None:
    """Return the first name that occurs twice; None: there is none."""
    return next((str(name) for name, count in Counter(names).items() if count > 1), None)


def check_form(text: str, type_: Any, subject: str, check: str, where: Place) -> None:
    """Refuse text that is not of a type of `schema/bounded.py`."""
    bounds = bounds_of(type_)
    if not bounds.takes(text):
        raise where.invalid(f"{subject} {text[:80]!r} is {bounds.fault}", check)


def check_ranks(
    shape: Sequence[object], stride: Sequence[object], subject: str, where: Place, check: str = "tensor-layout/ranks"
) -> None:
    """Refuse another number of strides than of sizes, or more than are read."""
    sizes, strides = len(shape), len(stride)
    if sizes != strides or sizes > MAX_AXES:
        raise where.invalid(f"{subject} has {sizes} sizes and {strides} strides; at most {MAX_AXES} are read", check)


def check_span(tensor: StoredPart | VectorPart, subject: str, where: Place) -> None:
    """Refuse sizes, strides and an offset that can address no storage, or one beyond 64 bits."""
    check_ranks(tensor.shape, tensor.stride, subject, where)
    numbers = *tensor.shape, *tensor.stride, tensor.offset
    if min(numbers) < 0:
        raise where.invalid(f"{subject} has negative sizes, strides or offset", "tensor-layout/negative")
    count = math.prod(max(size, 1) for size in tensor.shape)
    if max(count, span_end(tensor.shape, tensor.stride, tensor.offset), *numbers) > INT64_MAX:
        raise where.invalid(f"{subject} has sizes, strides or offset beyond 64 bits", "tensor-layout/beyond")


def span_end(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return the first element of storage after those that sizes, strides and offset address; 0 if there are none."""
    if 0 in shape:
        return 0
    return offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
