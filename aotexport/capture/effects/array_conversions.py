"""Patch conversions between tensors and NumPy arrays while a model is traced; see `array_proxies`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from aotexport.capture.effects import grad_mode
from aotexport.capture.effects.record import Effects
from aotexport.errors import ExportFailed
from aotexport.model.array_proxies import ArrayProxy, is_proxy, tensor_made_of, tensor_within
from aotexport.model.source_lines import user_line
from aotexport.process.patches import Patch
from aotexport.torch_internals.calls import FakeTensor
from aotexport_runtime.values import arrays


def patches(effects: Effects) -> list[Patch]:
    """Return patches of functions that make tensors of arrays, and of methods that make arrays of tensors."""
    shared, asarray, original = torch.from_numpy, torch.asarray, torch.Tensor.numpy

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, force=force)
        # Outside of the model's regions and of custom autograd functions, the trace has the call's own grad mode.
        recording = grad_mode.is_grad_enabled() and (grad_mode.within_region() or effects.grad)
        if self.requires_grad and recording and not force:
            raise ExportFailed(
                f"{user_line()}the model calls `Tensor.numpy` on a tensor that requires grad, which torch refuses. Use "
                "`tensor.detach().numpy()`, or leave out programs with gradients (`programs=('infer',)`)"
            )
        # A call whose tensor requires grad, unlike at capture, is refused when the array is returned.
        return ArrayProxy(self.detach().resolve_conj().resolve_neg() if force else self.view_as(self))

    def as_array(data: Any, *, copy: bool | None = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        if not is_proxy(data):
            return asarray(data, copy=copy, requires_grad=requires_grad, **kwargs)
        tensor = _converted(data, copy=bool(copy), **kwargs)
        return tensor.requires_grad_() if requires_grad else tensor

    reason = "Record conversions between tensors and arrays of NumPy"
    return [
        Patch(torch, "from_numpy", lambda array: tensor_made_of(array) if is_proxy(array) else shared(array), reason),
        Patch(torch, "as_tensor", taking_arrays(torch.as_tensor, copy=False), reason),
        Patch(torch, "asarray", as_array, reason),
        Patch(torch.Tensor, "numpy", numpy, reason),
        *_of_loaded_bundles(reason),
    ]


def _of_loaded_bundles(reason: str) -> list[Patch]:
    """Return patches of the functions by which calls of a loaded bundle take and give arrays."""
    why_not, tensor_of, array_of = arrays.why_not, arrays.tensor_of, arrays.array_of

    def array_in_trace(tensor: torch.Tensor) -> Any:
        return ArrayProxy(tensor) if isinstance(tensor, FakeTensor) else array_of(tensor)

    return [
        Patch(arrays, "why_not", lambda value: None if is_proxy(value) else why_not(value), reason),
        Patch(arrays, "tensor_of", lambda a: tensor_within(a) if is_proxy(a) else tensor_of(a), reason),
        Patch(arrays, "array_of", array_in_trace, reason),
    ]


def taking_arrays(function: Callable[..., torch.Tensor], *, copy: bool) -> Callable[..., torch.Tensor]:
    """Let a function that makes tensors of data take proxies of arrays too.

    Args:
        function: `torch.tensor` or one with its parameters.
        copy: whether it copies arrays.
    """

    @functools.wraps(function)
    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_proxy(data):
            return function(data, *args, **kwargs)
        return _converted(data, *args, copy=copy, **kwargs)

    return make


INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
"""Functions whose arguments may be arrays; not patched: Python leaves tensors sequences to C where that is undone."""


def without_arrays(value: Any) -> Any:
    """Return an argument of `INDEXING`, its arrays replaced by tensors."""
    if type(value) is tuple:
        return tuple(map(without_arrays, value))
    return tensor_made_of(value) if is_proxy(value) else value


def _converted(
    array: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    copy: bool,
    pin_memory: bool = False,
) -> torch.Tensor:
    tensor = tensor_made_of(array)
    return tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype, copy=copy)
