"""Encodes constants, the Python values that the format holds as they are; `constant_value` decodes them."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import torch

from aotexport_runtime.schema.trees import (
    Bytes,
    EllipsisLiteral,
    Key,
    NumpyNumber,
    NumpyType,
    PlainKey,
    PythonValue,
    Range,
)
from aotexport_runtime.schema.values import (
    AnyDType,
    Argument,
    ComplexArgument,
    DeviceArgument,
    DTypeArgument,
    FloatArgument,
    LayoutArgument,
    MemoryFormatArgument,
    SliceArgument,
    StringArgument,
)

_NUMPY_TYPES = frozenset(get_args(NumpyType))
_CONSTANT_TYPES = (bool, int, float, complex, str, torch.device, torch.memory_format)
_DTYPES = frozenset(f"torch.{name}" for name in get_args(AnyDType))


def is_constant(value: Any) -> bool:
    """Return whether `value` is a Python value that the format holds as it is."""
    if type(value) is slice:
        return all(part is None or type(part) is int for part in (value.start, value.stop, value.step))
    if type(value) is int:
        return abs(value) < 1 << 64
    if type(value) is str:
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if type(value) is torch.dtype:
        return str(value) in _DTYPES
    return value is None or value is torch.strided or type(value) in _CONSTANT_TYPES


def encode_constant(value: Any) -> Argument:
    """Return the argument record of a constant, for which `is_constant` holds."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, complex):
        return ComplexArgument(real=_float(value.real), imag=_float(value.imag))
    if isinstance(value, str):
        return StringArgument(value=value)
    if isinstance(value, slice):
        return SliceArgument(start=value.start, stop=value.stop, step=value.step)
    name = str(value).removeprefix("torch.")
    if isinstance(value, torch.dtype):
        return DTypeArgument(value=name)  # type: ignore[arg-type]
    if isinstance(value, torch.layout):
        return LayoutArgument(value="strided")
    if isinstance(value, torch.memory_format):
        return MemoryFormatArgument(value=name)  # type: ignore[arg-type]
    return DeviceArgument(type=value.type)


def _float(value: float) -> float | FloatArgument:
    if math.isfinite(value):
        return value
    return FloatArgument(value="nan" if math.isnan(value) else "inf" if value > 0 else "-inf")


def is_key(value: Any) -> bool:
    """Return whether `value` is a key of a dict that the format holds."""
    parts: tuple[Any, ...] = value if type(value) is tuple else (value,)
    return all(
        part is None
        or isinstance(part, str | int)
        or type(part) is bytes
        or (type(part) is float and math.isfinite(part))
        for part in parts
    )


def encode_key(value: Any) -> Key:
    """Return the record of a key, for which `is_key` holds."""
    if type(value) is tuple:
        return tuple(_plain_key(part) for part in value)
    return _plain_key(value)


def _plain_key(value: Any) -> PlainKey:
    return Bytes(hex=value.hex()) if type(value) is bytes else value


def is_python_value(value: Any) -> bool:
    """Return whether `value` is a Python value that the format holds as it is, and that no operator takes."""
    if type(value) is range:
        return all(abs(part) < 1 << 63 for part in (value.start, value.stop, value.step))
    return value is ... or type(value) is bytes or (isinstance(value, np.generic) and value.dtype.name in _NUMPY_TYPES)


def encode_python_value(value: Any) -> PythonValue:
    """Return the record of a value for which `is_python_value` holds."""
    if isinstance(value, bytes):
        return Bytes(hex=value.hex())
    if isinstance(value, range):
        return Range(start=value.start, stop=value.stop, step=value.step)
    if isinstance(value, np.generic):
        number = value.item()
        return NumpyNumber(dtype=value.dtype.name, value=_float(number) if isinstance(number, float) else number)  # type: ignore[arg-type]
    return EllipsisLiteral()
