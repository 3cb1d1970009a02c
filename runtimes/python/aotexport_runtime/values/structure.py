"""Encodes Python values: constants, and nested containers of them and of tensors, which `trees.builder` makes again."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, get_args

import numpy as np
import torch

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema import trees, values
from aotexport_runtime.values.trees import FACTORIES, SETS, ModelOutput

_NUMPY_TYPES = frozenset(get_args(trees.NumpyType))
_DTYPES = frozenset(f"torch.{name}" for name in get_args(values.AnyDType))


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
    return value is torch.strided if type(value) is torch.layout else type(value) in _ENCODERS


def _name(value: Any) -> Any:
    return str(value).removeprefix("torch.")


_ENCODERS: dict[type, Callable[[Any], values.Argument]] = {
    **dict.fromkeys((type(None), bool, int), lambda value: value),
    float: lambda value: _float(value),
    complex: lambda value: values.ComplexArgument(real=_float(value.real), imag=_float(value.imag)),
    str: lambda value: values.StringArgument(value=value),
    slice: lambda value: values.SliceArgument(start=value.start, stop=value.stop, step=value.step),
    torch.dtype: lambda value: values.DTypeArgument(value=_name(value)),
    torch.layout: lambda value: values.LayoutArgument(value=_name(value)),
    torch.memory_format: lambda value: values.MemoryFormatArgument(value=_name(value)),
    torch.device: lambda value: values.DeviceArgument(type=value.type),
}


def encode_constant(value: Any) -> values.Argument:
    """Return the argument record of a constant, for which `is_constant` holds."""
    return _ENCODERS[type(value)](value)


def _float(value: float) -> float | values.FloatArgument:
    if math.isfinite(value):
        return value
    return values.FloatArgument(value="nan" if math.isnan(value) else "inf" if value > 0 else "-inf")


def is_key(value: Any) -> bool:
    """Return whether `value` is a key of a dict that the format holds."""
    if type(value) is tuple:
        return all(type(part) is not tuple and is_key(part) for part in value)
    return (
        value is None
        or isinstance(value, str | int)
        or type(value) is bytes
        or (type(value) is float and math.isfinite(value))
    )


def encode_key(value: Any) -> Any:
    """Return the record of a key, for which `is_key` holds."""
    if type(value) is tuple:
        return tuple(map(encode_key, value))
    return trees.Bytes(hex=value.hex()) if type(value) is bytes else value


def encode_python_value(value: Any) -> trees.PythonValue | None:
    """Return the record of a Python value that the format holds, and that no operator takes; None: it is none."""
    if type(value) is bytes:
        return trees.Bytes(hex=value.hex())
    if type(value) is range and all(abs(part) < 1 << 63 for part in (value.start, value.stop, value.step)):
        return trees.Range(start=value.start, stop=value.stop, step=value.step)
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY_TYPES:
        number = value.item()
        return trees.NumpyNumber(dtype=value.dtype.name, value=_float(number) if isinstance(number, float) else number)  # type: ignore[arg-type]
    return trees.EllipsisLiteral() if value is ... else None


IndexOf = Callable[[torch.Tensor, str], int]
"""Returns the index of a tensor, given the tensor and its path."""

_MAPPINGS: dict[type, Any] = {
    dict: "dict",
    collections.OrderedDict: "ordered_dict",
    collections.Counter: "counter",
    collections.defaultdict: "default_dict",
}


def take_apart(value: Any, path: str, index_of: IndexOf, above: tuple[int, ...] = ()) -> trees.Tree:
    """Return the tree of `value`, from which `trees.builder` makes an equal value.

    `index_of` is called for every tensor; `above`: `id` of each container that `value` is in. Values of other kinds,
    and containers that hold themselves, are refused (`NotSupported`).
    """
    if isinstance(value, torch.Tensor):
        return trees.Leaf(index=index_of(value, path))
    if is_constant(value):
        return trees.Constant(value=encode_constant(value))
    if (constant := encode_python_value(value)) is not None:
        return trees.Constant(value=constant)
    if id(value) in above:
        raise NotSupported(f"`{path}` holds itself; a bundle holds trees of values")

    def items(children: Iterable[tuple[str, Any]]) -> tuple[trees.Tree, ...]:
        return tuple(take_apart(child, path + step, index_of, (*above, id(value))) for step, child in children)

    type_ = type(value)
    kind: Any = type_.__name__
    if type_ in SETS.values():
        # `repr` gives the same order in every process.
        return trees.Sequence(type=kind, items=items(("", item) for item in sorted(value, key=repr)))
    if type_ in _MAPPINGS:
        odd = [key for key in value if not is_key(key)]
        if odd:
            raise NotSupported(f"`{path}` has the key {odd[0]!r}, which a bundle cannot hold")
        factory: Any = _factory(getattr(value, "default_factory", None), path)
        named = items((f"[{key!r}]", item) for key, item in value.items())
        return trees.Mapping(type=_MAPPINGS[type_], keys=tuple(map(encode_key, value)), items=named, factory=factory)
    kind, fields = _fields(value)
    if kind is not None:
        named = items((f".{name}", item) for name, item in fields.items())
        return trees.NamedFields(type=kind, name=type_.__name__, fields=tuple(fields), items=named)
    is_own = type_.__bases__ in ((list,), (tuple,))
    if not is_own and type_ not in (list, tuple, torch.Size, collections.deque):
        raise NotSupported(f"`{path}` is a `{type_.__name__}`, which a bundle cannot hold")
    numbered = items((f"[{index}]", item) for index, item in enumerate(value))
    if isinstance(value, collections.deque):
        return trees.Sequence(type="deque", items=numbered, max_items=value.maxlen)
    if type_ is torch.Size:
        return trees.Sequence(type="size", items=numbered)
    name = type_.__name__ if is_own else None
    return trees.Sequence(type="list" if isinstance(value, list) else "tuple", items=numbered, name=name)


def _fields(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the kind of a record of named fields, and its fields; None: it is none."""
    type_ = type(value)
    if isinstance(value, ModelOutput):
        return "model_output", dict(value)
    if type_.__module__ == "torch.return_types":
        return "return_type", dict(zip(type_.__match_args__, value, strict=True))
    if isinstance(value, tuple) and hasattr(type_, "_fields"):
        return "namedtuple", dict(zip(type_._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Calls may have set further attributes.
        return "dataclass", vars(value)
    return None, {}


def _factory(factory: Any, path: str) -> str | None:
    name = next((name for name, known in FACTORIES.items() if known is factory), None)
    if name is None and factory is not None:
        raise NotSupported(f"`{path}` makes its missing values by {factory!r}, which a bundle cannot hold")
    return name
