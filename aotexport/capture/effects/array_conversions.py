"""Patch conversions between tensors and NumPy arrays while a model is traced; see `array_proxies`."""

from __future__ import annotations

from typing import Any

import torch

from aotexport.model.array_proxies import ArrayProxy, is_proxy, tensor_made_of, tensor_within
from aotexport.process.patches import Patch
from aotexport.torch_internals.calls import FakeTensor
from aotexport_runtime.values import arrays


def patches() -> list[Patch]:
    """Return patches of functions that take or give arrays, and that no mode sees: those of loaded bundles too."""
    from_numpy, why_not, tensor_of, array_of = torch.from_numpy, arrays.why_not, arrays.tensor_of, arrays.array_of

    def array_in_trace(tensor: torch.Tensor) -> Any:
        return ArrayProxy(tensor) if isinstance(tensor, FakeTensor) else array_of(tensor)

    reason = "Record conversions between tensors and arrays of NumPy"
    return [
        Patch(torch, "from_numpy", lambda a: tensor_made_of(a) if is_proxy(a) else from_numpy(a), reason),
        Patch(arrays, "why_not", lambda value: None if is_proxy(value) else why_not(value), reason),
        Patch(arrays, "tensor_of", lambda a: tensor_within(a) if is_proxy(a) else tensor_of(a), reason),
        Patch(arrays, "array_of", array_in_trace, reason),
    ]


INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
"""Functions whose arguments may be arrays; not patched: Python leaves tensors sequences to C where that is undone."""


def without_arrays(value: Any) -> Any:
    """Return an argument of `INDEXING`, its arrays replaced by tensors."""
    if type(value) is tuple:
        return tuple(map(without_arrays, value))
    return tensor_made_of(value) if is_proxy(value) else value


def converted(
    array: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    copy: bool | None,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Return the tensor that `torch.tensor`, `as_tensor` or `asarray` makes of the proxy of an array."""
    tensor = tensor_made_of(array)
    return tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype, copy=bool(copy))
