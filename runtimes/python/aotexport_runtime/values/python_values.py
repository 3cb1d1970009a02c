"""Constants of a call's arguments and results that no operator takes: bytes, ranges, NumPy scalars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aotexport_runtime.errors import NotSupported, Place
from aotexport_runtime.schema.trees import Bytes, EllipsisLiteral, Key, NumpyNumber, PythonValue, Range
from aotexport_runtime.schema.values import FloatArgument


def check_python_value(value: Any, where: Place) -> None:
    """Refuse a malformed constant of the kinds that only trees have.

    Raises:
        BundleInvalid: names the fault.
    """
    if isinstance(value, Bytes) and not (len(value.hex) % 2 == 0 and set(value.hex) <= set("0123456789abcdef")):
        raise where.invalid("the bytes of a tree are no pairs of hexadecimal digits", "structure-malformed/bytes")
    if isinstance(value, Range) and value.step == 0:
        raise where.invalid("a range of a tree has the step 0", "structure-malformed/range")
    if isinstance(value, NumpyNumber) and not _is_of_type(value):
        raise where.invalid(f"a NumPy number of a tree is no {value.dtype}", "structure-malformed/numpy-number")


def check_keys(keys: Iterable[Key], where: Place) -> None:
    """Refuse malformed keys of a dict.

    Raises:
        BundleInvalid: names the fault.
    """
    for key in keys:
        for part in key if isinstance(key, tuple) else (key,):
            check_python_value(part, where)


def _is_of_type(number: NumpyNumber) -> bool:
    value = number.value
    if number.dtype == "bool":
        return isinstance(value, bool)
    if number.dtype.startswith("float"):
        return isinstance(value, float | FloatArgument)
    bits = int(number.dtype.lstrip("uint"))
    low, high = (0, 1 << bits) if number.dtype.startswith("u") else (-1 << (bits - 1), 1 << (bits - 1))
    return type(value) is int and low <= value < high


def python_value(value: PythonValue) -> Any:
    """Return the Python value of a constant of the kinds that only trees have.

    Raises:
        NotSupported: it is NumPy's, which is not installed.
    """
    if isinstance(value, Bytes):
        return bytes.fromhex(value.hex)
    if isinstance(value, Range):
        return range(value.start, value.stop, value.step)
    if isinstance(value, EllipsisLiteral):
        return ...
    try:
        import numpy
    except ImportError:
        raise NotSupported(f"a value of the bundle is a NumPy {value.dtype}, and NumPy is not installed") from None
    number = value.value
    return numpy.dtype(value.dtype).type(float(number.value) if isinstance(number, FloatArgument) else number)
