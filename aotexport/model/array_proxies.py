"""Proxies of NumPy arrays in a trace, by `torch._numpy`; each has a tensor object of its own, which identifies it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy as np
import torch

from aotexport.errors import ExportFailed
from aotexport.model.source_lines import user_line
from aotexport.torch_internals.arrays import counterpart, counterpart_method, ndarray
from aotexport_runtime.values.arrays import array_of

_ATTRIBUTES = ("shape", "ndim", "size", "itemsize", "T", "real", "imag")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BINARY = (*_ARITHMETIC, "and", "or", "xor", "lshift", "rshift")
_SHAPING = (
    *("reshape", "squeeze", "transpose", "ravel", "copy", "view", "expand_dims", "broadcast_to", "where"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)
"""Functions that return an array for an array without axes, not a scalar."""
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert")


class ArrayProxy:
    """An array of a traced call, with the memory of a tensor of its own; `isinstance` takes it for an `ndarray`."""

    __slots__ = ("_tensor",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Return the class that it imitates."""
        return np.ndarray

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return its element type, by NumPy."""
        return np.dtype(str(self._tensor.dtype).removeprefix("torch."))

    def astype(self, dtype: Any, copy: bool = True) -> ArrayProxy:
        """Return a copy with another element type."""
        return ArrayProxy(self._tensor.to(_torch_dtype(dtype), copy=True)) if copy or self.dtype != dtype else self

    def flatten(self) -> ArrayProxy:
        """Return a copy with one axis."""
        return ArrayProxy(self._tensor.reshape(-1).clone(memory_format=torch.contiguous_format))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"'numpy.ndarray' object has no attribute '{name}'")
        if name in _ATTRIBUTES:
            return _wrapped(getattr(ndarray(self._tensor), name), [self], makes_scalar=False)
        method = counterpart_method(name)
        if method is None:
            _refuse(f"ndarray.{name}")
        return lambda *args, **kwargs: _applied(method, (self, *args), kwargs)

    def __len__(self) -> int:
        if not self._tensor.dim():
            raise TypeError("len() of unsized object")
        return self._tensor.shape[0]

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if any(isinstance(item, slice) and item.step is not None and item.step < 0 for item in items):
            _refuse("a slice of an array with a negative step", "Flip the tensor (`torch.flip`)")
        return _applied(_method("__getitem__"), (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        _applied(_method("__setitem__"), (self, index, value), {})

    def __bool__(self) -> bool:
        return bool(self._tensor)

    def __int__(self) -> int:
        return int(self._tensor)

    def __index__(self) -> int:
        return self._tensor.__index__()

    def __float__(self) -> float:
        return float(self._tensor)

    def __copy__(self) -> ArrayProxy:
        return ArrayProxy(self._tensor.clone())

    def __deepcopy__(self, memo: Any) -> ArrayProxy:
        return ArrayProxy(self._tensor.clone())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("an array where NumPy needs its own")

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        if method != "__call__" or len(out) > 1:
            _refuse(f"numpy.{ufunc.__name__}.{method}")
        if out and not is_proxy(out[0]):
            _refuse(f"numpy.{ufunc.__name__} into an array that is no argument")
        if any(isinstance(arg, torch.Tensor) for arg in args):
            return NotImplemented
        kwargs = {**kwargs, "out": out[0]} if out else kwargs
        return _computed(_function("numpy", ufunc.__name__), args, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _applied(_function(function.__module__, function.__name__), args, kwargs)


class ScalarProxy(ArrayProxy):
    """A scalar of NumPy in a traced call, which is immutable; its tensor has no axes."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Return the class that it imitates."""
        return self.dtype.type


def is_proxy(value: Any) -> bool:
    """Return whether `value` is a proxy of an array or scalar."""
    return type(value) in (ArrayProxy, ScalarProxy)


def is_scalar(value: Any) -> bool:
    """Return whether `value` is a proxy of a scalar."""
    return type(value) is ScalarProxy


def tensor_within(array: Any) -> torch.Tensor:
    """Return the tensor of a proxy itself: one per array."""
    return cast(ArrayProxy, array)._tensor


def as_argument(tensor: Any) -> Any:
    """Return the array to pass in a call for a tensor: a proxy in a trace, else a real array."""
    return array_of(tensor) if type(tensor) is torch.Tensor else ArrayProxy(tensor)


def tensor_made_of(array: Any) -> torch.Tensor:
    """Return a new tensor with the memory of a proxy, as `torch.from_numpy` does."""
    return tensor_within(array).detach()


def _function(module: str, name: str) -> Callable[..., Any]:
    found = counterpart(module, name)
    if found is None:
        _refuse(f"{module}.{name}")
    return found


def _method(name: str) -> Callable[..., Any]:
    found = counterpart_method(name)
    assert found is not None
    return found


def _refuse(name: str, way_out: str = "Convert the array (`torch.from_numpy`), and compute with torch") -> NoReturn:
    raise ExportFailed(
        f"{user_line()}the model uses {name if ' ' in name else f'`{name}`'}, which torch has no counterpart of. "
        f"{way_out}"
    )


def _applied(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call torch's counterpart of a function of NumPy; return its result as proxies."""
    known: list[ArrayProxy] = []
    result = function(*_unwrapped(args, known), **_unwrapped(kwargs, known))
    if is_proxy(kwargs.get("out")):
        return kwargs["out"]
    name = function.__name__
    if name == "__getitem__":
        # A number out of an array is a copy; with `...` it is an array without axes.
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return _wrapped(result, known, makes_scalar=not any(item is ... for item in index), copies_scalar=True)
    return _wrapped(result, known, makes_scalar=name not in _SHAPING)


def _computed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of numbers; with integers it computes in NumPy's double precision, not in torch's default."""
    result = _applied(function, args, kwargs)
    operands = [tensor_within(arg) for arg in args if is_proxy(arg)]
    whole = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in operands)
    if not (whole and is_proxy(result) and result.dtype == np.float32) or kwargs:
        return result
    return _applied(function, tuple(arg.astype(np.float64) if is_proxy(arg) else arg for arg in args), kwargs)


def _unwrapped(value: Any, known: list[ArrayProxy]) -> Any:
    if is_proxy(value):
        known.append(value)
        return ndarray(tensor_within(value))
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return ndarray(torch.full((), value.item(), dtype=_torch_dtype(value.dtype)))
    if type(value) is tuple:
        return tuple(_unwrapped(item, known) for item in value)
    if type(value) is list:
        return [_unwrapped(item, known) for item in value]
    return {key: _unwrapped(item, known) for key, item in value.items()} if type(value) is dict else value


def _wrapped(value: Any, known: list[ArrayProxy], *, makes_scalar: bool, copies_scalar: bool = False) -> Any:
    if isinstance(value, ndarray):
        tensor = value.tensor
        if makes_scalar and not tensor.dim():
            return ScalarProxy(tensor.clone() if copies_scalar else tensor)
        return ArrayProxy(tensor.view_as(tensor) if any(tensor is tensor_within(other) for other in known) else tensor)
    if type(value) in (tuple, list):
        items = [_wrapped(item, known, makes_scalar=makes_scalar) for item in value]
        return items if type(value) is list else tuple(items)
    return value


def _torch_dtype(dtype: Any) -> torch.dtype:
    return getattr(torch, np.dtype(dtype).name)


def _operator(name: str) -> Any:
    def operate(self: ArrayProxy, *operands: Any) -> Any:
        if any(isinstance(operand, torch.Tensor) for operand in operands):
            return NotImplemented
        return _computed(_method(name), (self, *operands), {})

    return operate


def _reflected(name: str) -> Any:
    def operate(self: ArrayProxy, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            if is_scalar(self):
                return getattr(other, f"__{name}__")(self._tensor)
            # A tensor before an array converts it: the result is a tensor.
            return tensor_made_of(_applied(_method(f"__r{name}__"), (self, other.numpy()), {}))
        return _computed(_method(f"__r{name}__"), (self, other), {})

    return operate


def _in_place(name: str) -> Any:
    def operate(self: ArrayProxy, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if is_scalar(self):
            return _applied(_method(f"__{name}__"), (self, other), {})
        _applied(_method(f"__i{name}__"), (self, other), {})
        return self

    return operate


for _name in (*_BINARY, *_COMPARED, *_UNARY):
    setattr(ArrayProxy, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _BINARY:
    setattr(ArrayProxy, f"__r{_name}__", _reflected(_name))
    setattr(ArrayProxy, f"__i{_name}__", _in_place(_name))
