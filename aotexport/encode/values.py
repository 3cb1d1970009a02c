"""Constants, arguments of operators and metadata of values to records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np
import torch

from aotexport.encode.sizes import encode_size
from aotexport.errors import ExportFailed
from aotexport.torch_internals.checks import is_data_dependent
from aotexport_runtime.schema.trees import Bytes, EllipsisLiteral, NumpyNumber, NumpyType, PythonValue, Range
from aotexport_runtime.schema.values import (
    AnyDType,
    Argument,
    ComplexArgument,
    DeviceArgument,
    DTypeArgument,
    FloatArgument,
    LayoutArgument,
    MemoryFormatArgument,
    NothingMeta,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    SliceArgument,
    StringArgument,
    TensorMeta,
    ValueMeta,
)

_NUMPY_TYPES = frozenset(get_args(NumpyType))
_CONSTANT_TYPES = (bool, int, float, complex, str, torch.device, torch.memory_format)
_DTYPES = frozenset(f"torch.{name}" for name in get_args(AnyDType))


def is_constant(value: Any) -> bool:
    """Return whether `value` is a Python value that the format holds as it is."""
    if isinstance(value, slice):
        return all(part is None or type(part) is int for part in (value.start, value.stop, value.step))
    if type(value) is int:
        return abs(value) < 1 << 64
    if type(value) is str:
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, torch.dtype):
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


def is_python_value(value: Any) -> bool:
    """Return whether `value` is a Python value that no operator takes, and that the format holds as it is."""
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


def encode_argument(value: Any, name_of: Mapping[torch.fx.Node, Argument], where: str) -> Argument:
    """Return the record of an operator's argument.

    Args:
        value: an argument of an FX node.
        name_of: name per earlier node; a body for those that stand for one.
        where: the node, for errors.

    Raises:
        ExportFailed: a kind of argument that the format does not have.
    """
    if isinstance(value, torch.fx.Node):
        return name_of[value]
    if isinstance(value, tuple | list):
        return [encode_argument(item, name_of, where) for item in value]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if is_data_dependent(value):
            raise ExportFailed(f"{where} takes a number that only the data know, and that no value of the graph is")
        return SizeArgument(value=encode_size(value))
    if is_constant(value):
        return encode_constant(value)
    raise ExportFailed(f"{where} has an argument of type `{type(value).__name__}`, which a bundle cannot hold")


def encode_meta(value: Any) -> ValueMeta:
    """Return the metadata record of a traced value (`node.meta['val']`)."""
    if value is None:
        return NothingMeta()
    if isinstance(value, torch.Tensor):
        return encode_result_meta(value)
    if isinstance(value, torch.SymInt | torch.SymBool) or type(value) is int:
        return SizeMeta(value=encode_size(value, or_none=True))
    if isinstance(value, torch.SymFloat):
        return ScalarMeta(type="float")
    if isinstance(value, bool | float):
        return ScalarMeta(type="bool" if isinstance(value, bool) else "float")
    if isinstance(value, tuple | list):
        return SequenceMeta(items=tuple(encode_meta(item) for item in value))
    raise ExportFailed(f"a traced value of type `{type(value).__name__}` is not supported")


def encode_result_meta(value: torch.Tensor) -> TensorMeta:
    """Return the metadata record of a result; where it begins in its storage is nobody's to rely on."""
    return msgspec.structs.replace(encode_tensor_meta(value), offset=0)


def encode_tensor_meta(value: torch.Tensor) -> TensorMeta:
    """Return the metadata record of a tensor.

    Raises:
        ExportFailed: not a strided tensor.
    """
    if value.layout is not torch.strided:
        raise ExportFailed(f"a tensor of layout {value.layout} is not supported; use strided tensors")
    return TensorMeta(
        dtype=str(value.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        shape=tuple(encode_size(size) for size in value.shape),
        stride=tuple(encode_size(step) for step in value.stride()),
        offset=encode_size(value.storage_offset()),
        device=value.device.type,
        requires_grad=value.requires_grad,
    )
