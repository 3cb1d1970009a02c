"""Results of operators that a fake tensor mode knows from an earlier call, made with little symbolic arithmetic.

Torch computes the size of their memory and its bounds from symbolic sizes: a quarter of an export with dynamic sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

# Source: torch 2.13, torch/_subclasses/fake_tensor.py, `_get_output_tensor_from_cache_entry`.
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotexport.process.patches import Patch, patched


@contextmanager
def made_quickly(environment: ShapeEnv) -> Iterator[None]:
    """Make a view from the tensor that it views, and another result from the size of its memory, in one environment."""
    plain = FakeTensorMode._get_output_tensor_from_cache_entry

    def made(self: FakeTensorMode, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        # Torch 2.13 passes the operator before its arguments, later releases do not.
        meta, arguments = entry.metadata, call[-1]
        viewed = None if entry.view_idx is None else arguments[entry.view_idx]
        if self.shape_env is not environment or meta is None or not _is_plain(meta, viewed):
            return plain(self, state, entry, key, *call)

        def known(value: Any) -> int | torch.SymInt:
            return value if isinstance(value, int) else value.extract(key, environment)

        sizes, strides = [known(size) for size in meta.shape], [known(stride) for stride in meta.stride]
        with in_kernel_invocation_manager(self), environment.suppress_guards():
            if viewed is not None:
                result = torch.as_strided(viewed, sizes, strides, known(meta.storage_offset))
            else:
                # `torch.UntypedStorage` takes no symbolic size.
                memory = torch.empty(known(meta.storage_bytes), dtype=torch.uint8, device="meta").untyped_storage()
                empty = torch.empty(0, dtype=meta.dtype, device="meta").set_(memory, 0, (0,), (1,))
                result = empty.as_strided(sizes, strides, 0)
        return FakeTensor(self, result, meta.device, requires_grad=meta.requires_grad)

    def memory_format(tensor: torch.Tensor) -> torch.memory_format:
        return torch.contiguous_format if tensor._has_symbolic_sizes_strides else suggest_memory_format(tensor)

    reason = "Make results that are known from an earlier call with little symbolic arithmetic"
    unused = "Compute no memory format for the key of a tensor with symbolic sizes, which has none"
    with patched(
        Patch(FakeTensorMode, "_get_output_tensor_from_cache_entry", made, reason),
        Patch(fake_tensor, "suggest_memory_format", memory_format, unused),
    ):
        yield


def _is_plain(meta: Any, viewed: torch.Tensor | None) -> bool:
    """Return whether a result is made of its sizes, strides and memory alone."""
    if meta.is_conj or meta.is_neg or meta.layout is not torch.strided:
        return False
    return viewed is None or not (viewed.dtype is not meta.dtype or viewed.is_conj() or viewed.is_neg())
