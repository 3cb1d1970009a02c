"""Symbolic arithmetic of a trace, computed once per operation and operands.

Torch computes the sizes, strides and contiguity of every fake tensor anew. Of the binary operations of an export with
dynamic sizes, 99 % repeat earlier ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import mode_stack_state_for_pre_dispatch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

# Source: torch 2.13, torch/fx/experimental/sym_node.py, `_make_node_magic`.
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotexport.process.patches import Patch, patched

# Of integers, floats and booleans. `mod` is left out: its result depends on the ranges that are known so far.
_METHODS = (
    *("add", "sub", "mul", "int_floordiv", "int_truediv", "pow_by_natural", "sym_min", "sym_max"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"),
)
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FIRST = 0
"""The place of proxy modes among the modes above autograd."""
_HINTS = (int, float, bool, type(None))
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
    above_autograd = mode_stack_state_for_pre_dispatch()

    def forget() -> None:
        nonlocal version
        version = environment._replacements_version_counter
        for results in known.values():
            results.clear()

    def remembering(method: str, compute: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
        results = known[method]

        def computed(self: SymNode, other: SymNode) -> SymNode:
            # Under a proxy mode the operation takes a node in a graph.
            if self.shape_env is not environment or _dispatch_mode(_PROXY) or above_autograd.get(_FIRST):
                return compute(self, other)
            hint, hint_of_other = self._hint, other._hint
            if type(hint) not in _HINTS or type(hint_of_other) not in _HINTS:
                return compute(self, other)
            if version != environment._replacements_version_counter:
                forget()
            one, two = self._expr, other._expr
            types = self.pytype, other.pytype, self._optimized_summation, other._optimized_summation
            key = id(one), id(two), hint, hint_of_other, types
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
