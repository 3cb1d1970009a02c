"""Symbolic arithmetic of a trace, computed once per operation and operands, and little of it for known results.

Of the binary operations of an export with dynamic sizes, 99 % repeat earlier ones; without the two it takes 40 % more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

# Source: torch 2.13, torch/_subclasses/fake_tensor.py, `_get_output_tensor_from_cache_entry`.
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

# Source: torch 2.13, torch/fx/experimental/sym_node.py, `_make_node_magic`.
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotexport.process.patches import Patch, patched

_METHODS = ("add", "eq", "mul")
"""Three quarters of all operations. The result of `mod` depends on the ranges that are known so far."""
_REASON = "Compute repeated symbolic arithmetic once"


@contextmanager
def computed_once(environment: ShapeEnv) -> Iterator[None]:
    """Take the earlier result, in a new node, for a repeated binary operation on symbols of `environment`.

    Results are forgotten when the environment learns that a symbol equals something: expressions change then.
    """
    if environment._translation_validation_enabled:
        yield
        return
    version = environment._replacements_version_counter
    known: dict[str, dict[Any, tuple[Any, ...]]] = {name: {} for name in _METHODS}

    def forget() -> None:
        nonlocal version
        version = environment._replacements_version_counter
        for results in known.values():
            results.clear()

    def remembering(method: str, compute: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
        results = known[method]

        def computed(self: SymNode, other: SymNode) -> SymNode:
            # Under a proxy mode the operation takes a node in a graph.
            if self.shape_env is not environment or get_proxy_mode() is not None:
                return compute(self, other)
            if version != environment._replacements_version_counter:
                forget()
            one, two = self._expr, other._expr
            types = self.pytype, other.pytype, self._optimized_summation, other._optimized_summation
            key = id(one), id(two), self._hint, other._hint, types
            found = results.get(key)
            if found is None or found[0]._hint is None:
                # The operands live as long as the result, so that their identities are not taken by others.
                made = compute(self, other)
                results[key] = (made, one, two)
                return made
            # A graph tells sizes apart by their nodes: a shared one would lead from one tensor's size to another's.
            node = object.__new__(SymNode)
            node.__dict__.update(found[0].__dict__)
            return node

        return functools.update_wrapper(computed, compute)

    patches = [
        Patch(SymNode, name, remembering(name, getattr(SymNode, name)), _REASON, in_all_threads=True)
        for name in _METHODS
    ]
    with patched(*patches, _functional_tensors()):
        yield


def _functional_tensors() -> Patch:
    make = FunctionalTensor.__new__

    def made(cls: type[FunctionalTensor], elem: Any, mode: Any) -> FunctionalTensor:
        with disable_proxy_modes_tracing():
            return make(cls, elem, mode)

    reason = "Record no arithmetic for the layout of a functional tensor, which its value has too"
    return Patch(FunctionalTensor, "__new__", made, reason)


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
    is_plain = not (meta.is_conj or meta.is_neg) and meta.layout is torch.strided
    return is_plain and (viewed is None or not (viewed.dtype is not meta.dtype or viewed.is_conj() or viewed.is_neg()))
