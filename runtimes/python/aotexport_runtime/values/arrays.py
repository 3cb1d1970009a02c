"""NumPy arrays among arguments and results: a call converts them to and from tensors with the same memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

_ARRAY = "_aotexport_array"


def why_not(value: Any) -> str | None:
    """Return why `value` cannot be taken as an array; None: it can."""
    if type(value) is not np.ndarray:
        return "is no `numpy.ndarray`"
    if not value.flags.writeable:
        return "is an array that is not writable, which tensors cannot be; pass a copy"
    try:
        torch.from_numpy(value)
    except (TypeError, ValueError):
        return f"is an array of {value.dtype} with strides {value.strides}, which no tensor has; pass a copy"
    return None


def tensor_of(array: Any) -> torch.Tensor:
    """Return a new tensor with the memory of an array; `array_of` gives the array back."""
    tensor = torch.from_numpy(array)
    setattr(tensor, _ARRAY, weakref.ref(array))
    return tensor


def array_of(tensor: torch.Tensor) -> Any:
    """Return the array with the memory of a tensor: the living one that it was made of or gave before, or a new one.

    As `Tensor.numpy`, it raises `RuntimeError` for a tensor that requires grad.
    """
    array = known_array(tensor)
    if array is None:
        array = tensor.numpy()
        setattr(tensor, _ARRAY, weakref.ref(array))
    return array


def known_array(tensor: torch.Tensor) -> Any:
    """Return the living array that a tensor was made of or gave; None: there is none."""
    reference = getattr(tensor, _ARRAY, None)
    return None if reference is None else reference()
