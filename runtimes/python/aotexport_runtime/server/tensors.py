"""Values of the protocol: datatypes by name, raw bytes, and numbers of JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.server.refusals import Refusal

Array = np.ndarray[Any, Any]

_DATATYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
_BYTES_AS = {
    **{datatype: np.dtype(name) for name, datatype in _DATATYPES.items() if datatype != "BF16"},
    "BF16": np.dtype(np.uint16),
}
"""Dtype of the raw bytes of a datatype; little endian, as the protocol has it."""

WITHOUT_JSON = ("FP16", "BF16")
"""Datatypes that the protocol sends as raw bytes alone."""

_MOST_AXES, _MOST_ELEMENTS = 32, 1 << 59
_NUMBERS: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}
"""Types of what a datatype takes from JSON; of the others, integers."""


def datatype_of(name: str, dtype: str) -> str:
    """Return the protocol's datatype of the dtype of an input or output; `NotSupported`: it has none."""
    if dtype not in _DATATYPES:
        raise NotSupported(f"`{name}` is {dtype}, and the protocol has no such datatype; return it as float32")
    return _DATATYPES[dtype]


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: Any) -> Array:
    """Return an input of a shape that the client states from its raw bytes; BF16 as float32, BYTES as strings.

    The array is a view of the buffer `data` where alignment allows.

    Raises:
        Refusal: the bytes are not those of the shape.
    """
    if datatype == "BYTES":
        return _array_of_strings(name, shape, _strings(name, data, _count(name, shape)))
    dtype = _BYTES_AS[datatype]
    expected = _count(name, shape) * dtype.itemsize
    if len(data) != expected:
        raise Refusal(f"`{name}`: {datatype}{list(shape)} takes {expected} bytes, and there are {len(data)}")
    array = np.frombuffer(data, dtype).reshape(shape)
    if datatype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise Refusal(f"`{name}`: bytes of BOOL are 0 and 1")
    if not array.flags.aligned:
        array = array.copy()
    return (array.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else array


def from_numbers(name: str, datatype: str, shape: Sequence[int], numbers: Any) -> Array:
    """Return an input from numbers of JSON, flat or nested; of BYTES, from a flat list of strings.

    Raises:
        Refusal: they are no numbers of the datatype, or not as many as the shape has.
    """
    if datatype in WITHOUT_JSON:
        raise Refusal(f"`{name}`: {datatype} has no form in JSON; send it as binary data")
    if datatype == "BYTES":
        return _array_of_strings(name, shape, numbers)
    # Not by numpy, which gives each of many strings the room of the longest.
    while list in (kinds := {*map(type, numbers)}):
        if len(kinds) > 1 or len({*map(len, numbers)}) > 1:
            raise Refusal(f"`{name}`: the lists of its data differ in length")
        numbers = [*itertools.chain.from_iterable(numbers)]
    dtype, count = _BYTES_AS[datatype], _count(name, shape)
    if len(numbers) != count:
        raise Refusal(f"`{name}`: {datatype}{list(shape)} takes {count} numbers, and there are {len(numbers)}")
    if not kinds <= _NUMBERS.get(datatype, {int}):
        raise Refusal(f"`{name}`: its data are no numbers of {datatype}")
    if dtype.kind in "iu" and count:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if min(numbers) < least or max(numbers) > most:
            raise Refusal(f"`{name}`: {datatype} goes from {least} to {most}")
    try:
        with np.errstate(over="raise"):
            return np.array(numbers, np.float64 if dtype.kind == "f" else dtype).astype(dtype).reshape(shape)
    except (FloatingPointError, OverflowError):
        raise Refusal(f"`{name}`: one of its data is beyond {datatype}") from None


def _strings(name: str, data: Any, count: int) -> list[bytes]:
    """Return the strings of raw bytes, and at most one more than `count`: each behind its length in four bytes."""
    found: list[bytes] = []
    end = 0
    while end < len(data) and len(found) <= count:
        begin = end + 4
        end = begin + int.from_bytes(data[end:begin], "little")
        if max(begin, end) > len(data):
            raise Refusal(f"`{name}`: its data end within a string")
        found.append(bytes(data[begin:end]))
    return found


def _array_of_strings(name: str, shape: Sequence[int], strings: Sequence[Any]) -> Array:
    count = _count(name, shape)
    if len(strings) != count:
        found = "more" if len(strings) > count else len(strings)
        raise Refusal(f"`{name}`: BYTES{list(shape)} takes {count} strings, and there are {found}")
    try:
        texts = [each if isinstance(each, str) else bytes.decode(each) for each in strings]
    except (TypeError, UnicodeDecodeError):
        raise Refusal(f"`{name}`: its data are no strings of UTF-8") from None
    return np.array(texts, object).reshape(shape)


def _count(name: str, shape: Sequence[int]) -> int:
    # Axes beside an empty one count as well: no array has them if they are too long.
    if len(shape) > _MOST_AXES or min(shape, default=0) < 0 or math.prod(filter(None, shape)) > _MOST_ELEMENTS:
        raise Refusal(f"`{name}`: no tensor has the shape {list(shape)[:_MOST_AXES]}")
    return math.prod(shape)


def to_bytes(datatype: str, array: Array) -> bytes | memoryview:
    """Return the raw bytes of a tensor, in its memory where they are; of BF16 from float32, of BYTES from strings."""
    if datatype == "BYTES":
        encoded = [text.encode() for text in array.ravel()]
        return b"".join(len(each).to_bytes(4, "little") + each for each in encoded)
    if datatype == "BF16":
        # The values are those of bfloat16: the lower half is 0.
        array = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
