"""What a tensor holds, for its digest: values, layout, memory shared with others, and its record of gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy
import torch

_INNER = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Tensors that a sparse one is made of, by layout."""


def tensor_parts(tensor: Any) -> Iterator[Any]:
    """Yield what tells a tensor from others: numbers, texts, and the objects that it is made of.

    Raises:
        TypeError: it is of a kind whose values cannot be read, or was computed by operators that record gradients.
    """
    if tensor.grad_fn is not None:
        raise TypeError("was computed with gradients recorded")
    yield from (tensor.dtype, tensor.shape, tensor.layout, tensor.device, tensor.requires_grad, tensor.is_inference())
    yield from (
        tensor.grad,
        tensor._backward_hooks,
        getattr(tensor, "_post_accumulate_grad_hooks", None),
        getattr(tensor, "names", None),
    )
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        yield from (context, tensor.stride())
        for name in names:
            yield name
            yield getattr(tensor, name)
    elif tensor.layout in _INNER:
        yield tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
        for name in _INNER[tensor.layout]:
            yield getattr(tensor, name)()
    elif tensor.layout is torch.strided and not tensor.is_quantized:
        yield from (tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        yield tensor.untyped_storage()
    else:
        raise TypeError(f"is a tensor of layout {tensor.layout}")


def array_parts(array: numpy.ndarray) -> Iterator[Any]:
    """Yield what tells an array of NumPy from others."""
    base: Any = array.base
    yield from (array.dtype, array.shape, array.strides, array.flags.writeable, base)
    if isinstance(base, numpy.ndarray | torch.Tensor):
        yield array.ctypes.data - (base.ctypes.data if isinstance(base, numpy.ndarray) else base.data_ptr())
    yield array.tolist() if array.dtype.hasobject else array.tobytes()


def storage_bytes(storage: torch.UntypedStorage) -> Any:
    """Return the bytes of a storage, borrowed from it where it is in the processor's memory.

    Raises:
        TypeError: it has no memory, like that of tensors on the meta device.
    """
    if storage.device.type == "meta":
        raise TypeError("has no values")
    if storage.device.type != "cpu":
        storage = storage.cpu()
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())) if storage.nbytes() else b""
