"""Tensors of a call: torch's, where torch was imported, and numpy arrays. No torch at import."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

_CPU = SimpleNamespace(type="cpu")


class NumpyTensor:
    """A numpy array with the metadata that guards read, under torch's names; the array is borrowed."""

    layout = "strided"
    device = _CPU
    requires_grad = False
    is_leaf = True

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value = value
        self.dtype = value.dtype.name
        self.shape = value.shape
        self.ndim = value.ndim

    def stride(self) -> tuple[int, ...]:
        """Return the step per axis, in elements."""
        return tuple(step // self.value.itemsize for step in self.value.strides)

    def storage_offset(self) -> int:
        """Return 0: numpy knows no storage before its first element."""
        return 0


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor of torch or a `NumpyTensor`."""
    return isinstance(value, NumpyTensor) or is_torch_tensor(value)


def is_torch_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor of torch, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def size_type() -> type | None:
    """Return `torch.Size`; None: torch was not imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.Size


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, or stands for one in a trace; flags are none."""
    return type(value) is int or (type(value).__module__, type(value).__name__) == ("torch", "SymInt")
