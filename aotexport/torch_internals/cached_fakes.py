"""Results of operators that a fake tensor mode knows from an earlier call, made with little symbolic arithmetic.

Torch makes such a result with `empty_strided`, and a view with `set_` after it. Both compute the size of the memory and
its bounds from symbolic sizes: a tenth of the time of an export with dynamic sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

# Source: torch 2.13, torch/_subclasses/fake_tensor.py, `_get_output_tensor_from_cache_entry`.
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, TensorMetadata, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotexport.process.patches import Patch, patched


@contextmanager
def made_quickly(environment: ShapeEnv) -> Iterator[None]:
    """Make a view from the tensor that it views, and another result from the size of its memory.

    An entry of the cache has these, and the sizes and strides. Modes with another environment than `environment` are
    left to torch.
    """
    plain = FakeTensorMode._get_output_tensor_from_cache_entry
    plain_key, plain_validate = FakeTensorMode._cache_key, FakeTensorMode._validate_output_for_cache_entry
    plain_flatten, ignores = TensorMetadata._flatten_into, False

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

    def cache_key(self: FakeTensorMode, state: Any, func: Any, *arguments: Any) -> Any:
        nonlocal ignores
        before, ignores = ignores, self.shape_env is environment and _ignores_gradients(func)
        try:
            return plain_key(self, state, func, *arguments)
        finally:
            ignores = before

    def flatten_into(self: TensorMetadata, *arguments: Any) -> None:
        # Made for this key alone.
        self.requires_grad = self.requires_grad and not ignores
        plain_flatten(self, *arguments)

    def validate(self: FakeTensorMode, state: Any, key: Any, func: Any, *call: Any) -> None:
        if _ignores_gradients(func) and isinstance(call[-1], FakeTensor) and call[-1].requires_grad:
            raise fake_tensor._BypassDispatchCache("requires grad")
        plain_validate(self, state, key, func, *call)

    def memory_format(tensor: torch.Tensor) -> torch.memory_format:
        return torch.contiguous_format if tensor._has_symbolic_sizes_strides else suggest_memory_format(tensor)

    reason = "Make results that are known from an earlier call with little symbolic arithmetic"
    unused = "Compute no memory format for the key of a tensor with symbolic sizes, which has none"
    alike = "Keep results apart by `requires_grad` only where an operator looks at it"
    with patched(
        Patch(FakeTensorMode, "_get_output_tensor_from_cache_entry", made, reason),
        Patch(fake_tensor, "suggest_memory_format", memory_format, unused),
        Patch(FakeTensorMode, "_cache_key", cache_key, alike),
        Patch(TensorMetadata, "_flatten_into", flatten_into, alike),
        Patch(FakeTensorMode, "_validate_output_for_cache_entry", validate, alike),
    ):
        yield


@functools.cache
def _ignores_gradients(operator: Any) -> bool:
    """Return whether the fake result of an operator is the same whether or not its operands require grad.

    Fake kernels run below autograd. Composite operators and convolutions choose by it what they compute; of operators
    in other namespaces it is not known.
    """
    if not isinstance(operator, OpOverload) or operator.namespace not in ("aten", "prims"):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    return not composite and "conv" not in operator.name()


def _is_plain(meta: Any, viewed: torch.Tensor | None) -> bool:
    """Return whether a result is made of its sizes, strides and memory alone."""
    if meta.is_conj or meta.is_neg or meta.layout is not torch.strided:
        return False
    return viewed is None or not (viewed.dtype is not meta.dtype or viewed.is_conj() or viewed.is_neg())
