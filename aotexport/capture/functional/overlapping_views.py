"""Views whose elements overlap (`as_strided`, `unfold`: sliding windows) in a joint graph.

Torch's backward for them sums the gradients of one element. With dynamic sizes it asks for the number of elements as a
number, which would fix the example's sizes. The backward here computes the same with a symbolic size. The gradient of
a returned view is traced as contiguous.

Source: torch 2.13, torch/csrc/autograd/FunctionsManual.cpp, Note [as_strided Backward and layout-aware/agnostic
autograd].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.names import MemoryFormatMeta, statically_known_true


class OverlappingView(torch.autograd.Function):
    """`tensor.as_strided(size, stride, offset)`, for a tensor whose own elements do not overlap."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
    ) -> torch.Tensor:
        """Return the view."""
        view = tensor.as_strided(size, stride, offset)
        ctx.geometries = _geometry(tensor), _geometry(view)
        return view

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of the tensor: per element, the sum over the places that show it."""
        (grad,), ((size, stride, offset), (view_size, view_stride, view_offset)) = grads, ctx.geometries
        first = torch.sym_min(offset, view_offset)
        offset, view_offset = offset - first, view_offset - first
        count: Any = torch.sym_max(_extent(size, stride, offset), _extent(view_size, view_stride, view_offset))
        places = torch.arange(count, device=grad.device).as_strided(view_size, view_stride, view_offset)
        storage = grad.new_zeros(count).index_add(0, places.reshape(-1), grad.reshape(-1))
        return storage.as_strided(size, stride, offset), None, None, None


def asks_for_size(tensor: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> bool:
    """Return whether torch's backward of this view would turn a dynamic size into a number."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    dynamic = any(isinstance(value, torch.SymInt) for value in (*tensor.size(), *size, *stride))
    return dynamic and _overlaps(size, stride) and not _overlaps(tensor.size(), tensor.stride())


@contextlib.contextmanager
def contiguous_tangents() -> Iterator[None]:
    """Trace the gradient of an output whose elements overlap as contiguous: its elements do not overlap.

    AOTAutograd does so for expanded tensors alone, and gives other gradients the strides of the output.

    Source: torch 2.13, `_functorch/_aot_autograd/schemas.py`, `MemoryFormatMeta.from_tensor`.
    """
    original = MemoryFormatMeta.from_tensor

    def from_tensor(t: torch.Tensor, force_use_memory_format: bool = False) -> MemoryFormatMeta | None:
        static = t.layout is torch.strided and all(isinstance(size, int) for size in (*t.size(), *t.stride()))
        return original(t, force_use_memory_format or (static and _overlaps(t.size(), t.stride())))

    reason = "Trace gradients of outputs whose elements overlap as contiguous"
    with patched(Patch(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor), reason)):
        yield


def _overlaps(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Return whether elements may share memory, as far as is known without a guard."""
    reached: Any = 0
    for step, length in sorted(zip(stride, size, strict=True), key=lambda axis: _hint(axis[0])):
        if statically_known_true(length == 1):
            continue
        if not statically_known_true(step > reached):
            return True
        reached = reached + step * (length - 1)
    return False


def _hint(step: Any) -> int:
    return step.node.hint if isinstance(step, torch.SymInt) else step


def _geometry(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def _extent(size: Sequence[Any], stride: Sequence[Any], offset: Any) -> Any:
    """Return the number of elements of memory that a tensor spans; none of its sizes is 0."""
    return offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
