"""Operators that give memory as it is found, with what other tensors have left there, or memory of other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from aotexport_runtime.execution.preconditions.require import Arguments, require, spacious

_LIKE = ("empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

FRESH = frozenset(
    (
        *("empty.memory_format", "_make_dep_token.default"),
        *(f"{name}.default" for name in _LIKE),
        *(f"{name}.out" for name in _LIKE),
    )
)
"""Operators whose results nobody has written; with `out` they copy such a result to it."""

GROWING = frozenset(("empty.out", "resize_.default", "resize_as_.default"))
"""Operators that may give a tensor more memory, which nobody has written."""


def zeroed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives zeros where an operator of `FRESH` gives any bytes."""
    return lambda *args, **kwargs: function(*args, **kwargs).zero_()


def grown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives zeros where an operator of `GROWING` gives any bytes beside the tensor's own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = kwargs.get("out", args[0])
        before = tensor.untyped_storage().nbytes()
        result = function(*args, **kwargs)
        storage = tensor.untyped_storage()
        if storage.nbytes() > before and storage.device.type != "meta":
            place = torch.empty(0, dtype=torch.uint8, device=storage.device)
            place.set_(storage, before, (storage.nbytes() - before,), (1,)).zero_()
        return result

    return call


def moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `set_data`, after which a tensor of other sizes has another version: autograd keeps tensors, not sizes."""

    def call(tensor: torch.Tensor, new_data: torch.Tensor) -> None:
        before = _geometry(tensor)
        function(tensor, new_data)
        if _geometry(tensor) != before:
            increment_version(tensor)

    return call


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def own(value: Any) -> Any:
    """Return an argument or a result with copies of its tensors of integers and of masks."""
    if isinstance(value, list | tuple):
        return tuple(map(own, value)) if isinstance(value, tuple) else [*map(own, value)]
    is_own = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.clone() if is_own else value


def place(given: Any, what: str) -> None:
    """Check that tensors into which an operator writes its results have memory for each element."""
    for tensor in given if isinstance(given, list | tuple) else [given]:
        spacious(tensor, what)


def strided(a: Arguments) -> None:
    """Check that the place of a view's last element is a number that kernels compute with."""
    last = (a["storage_offset"] or 0) + sum(size * step for size, step in zip(a["size"], a["stride"], strict=False))
    require(last < _MOST_ELEMENTS, "`size` and `stride` must lie in the memory of `self`")


_MOST_ELEMENTS = 1 << 56


def same_dtype(a: Arguments) -> None:
    """Check that a tensor takes the memory of one with elements of the same size."""
    require(a["self"].dtype == a["source"].dtype, "`source` must be of the dtype of `self`")
    if "size" in a:
        shape, stride, offset = a["size"], a["stride"], a["storage_offset"]
        steps = list(stride) if stride else list(torch.empty(shape, device="meta").stride())
        require(
            len(steps) == len(shape) and min((offset, *shape, *steps)) >= 0, "`size` and `stride` must fit together"
        )
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        source = a["source"]
        held = source.untyped_storage().nbytes() // source.element_size() - source.storage_offset()
        require(0 in shape or last < held, "the tensor must lie in the memory of `source`")
