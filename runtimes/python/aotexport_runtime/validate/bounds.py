"""Bounds and forms of values in every record: indices, integers, names, text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from aotexport_runtime.errors import Place
from aotexport_runtime.values.sizes import INT64_MAX

MAX_NODES = 1_000_000
MAX_AXES = 64
MAX_TEXT = 1000
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_index(index: int, count: int, subject: str, where: Place) -> None:
    """Refuse an index outside `range(count)`.

    Raises:
        BundleInvalid: names `subject`.
    """
    if not 0 <= index < count:
        raise where.invalid(f"{subject} is {index}, out of range({count})", "index-range")


def check_unique(names: Iterable[object], subject: str, where: Place) -> None:
    """Refuse a name that occurs twice.

    Raises:
        BundleInvalid: names `subject`.
    """
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise where.invalid(f"{subject} {str(name)[:80]!r} occurs twice", "name-twice")
        seen.add(name)


def check_plain_name(name: str, subject: str, where: Place) -> None:
    """Refuse a name that is not plain: it becomes part of a path.

    Raises:
        BundleInvalid: names `subject`.
    """
    if not PLAIN_NAME.fullmatch(name):
        raise where.invalid(f"{subject} {name[:80]!r} is not a plain name", "name-malformed")


def check_text(text: str, subject: str, where: Place) -> None:
    """Refuse text, shown in one line, that is long or holds control characters, which a terminal would obey.

    Raises:
        BundleInvalid: names `subject`.
    """
    if len(text) > MAX_TEXT or not text.isprintable():
        raise where.invalid(f"{subject} {text[:80]!r} is too long or not printable", "text-malformed")


def check_span(shape: Sequence[int], stride: Sequence[int], offset: int, subject: str, where: Place) -> None:
    """Refuse sizes, strides and an offset that can address no storage, or one beyond 64 bits.

    Raises:
        BundleInvalid: names `subject`.
    """
    if len(shape) != len(stride) or len(shape) > MAX_AXES:
        raise where.invalid(f"{subject} has {len(shape)} sizes and {len(stride)} strides", "tensor-layout")
    if offset < 0 or min((*shape, *stride), default=0) < 0:
        raise where.invalid(f"{subject} has negative sizes, strides or offset", "tensor-layout")
    count = 1
    for size in shape:
        count *= max(size, 1)
    if max(count, span_end(shape, stride, offset), *shape, *stride, offset) > INT64_MAX:
        raise where.invalid(f"{subject} has sizes, strides or offset beyond 64 bits", "tensor-layout")


def span_end(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return the first element of storage after those that sizes, strides and offset address; 0 if there are none."""
    if 0 in shape:
        return 0
    return offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
