"""Symbolic arithmetic of a trace, computed once per operation and operands.

Torch computes the sizes, strides and contiguity of every fake tensor anew. Of the binary operations of an export with
dynamic sizes, 99 % repeat earlier ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Source: torch 2.13, torch/fx/experimental/sym_node.py, `_make_node_magic`.
from torch.fx.experimental.sym_node import _NO_HINT, SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotexport.process.patches import Patch, patched

# Of integers, floats and booleans. `mod` is left out: its result depends on the ranges that are known so far.
_METHODS = (
    *("_add", "_sub", "_mul", "_int_floordiv", "_int_truediv", "_pow_by_natural", "_sym_min", "_sym_max"),
    *("_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_and_", "_or_"),
)
_HINTS = (int, float, bool, type(None))


@contextmanager
def computed_once(environment: ShapeEnv) -> Iterator[None]:
    """Take the earlier result, in a new node, for a repeated binary operation on symbols of `environment`.

    Results are forgotten when the environment learns that a symbol equals something: expressions change then.
    """
    if environment._translation_validation_enabled:
        yield
        return
    known: dict[Any, SymNode] = {}
    version = environment._replacements_version_counter

    def remembering(method: str, compute: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
        def computed(self: SymNode, other: SymNode) -> SymNode:
            nonlocal version
            # Under a proxy mode the operation takes a node in a graph.
            if self.shape_env is not environment or get_proxy_mode() is not None:
                return compute(self, other)
            if type(self._hint) not in _HINTS or type(other._hint) not in _HINTS:
                return compute(self, other)
            if version != environment._replacements_version_counter:
                version = environment._replacements_version_counter
                known.clear()
            key = (method, *_identity(self), *_identity(other))
            found = known.get(key)
            if found is None:
                found = known[key] = compute(self, other)
                return found
            # A graph tells sizes apart by their nodes: a shared one would lead from one tensor's size to another's.
            hint = _NO_HINT if found._hint is None else found._hint
            summation = found._optimized_summation
            return SymNode(found._expr, environment, found.pytype, hint, optimized_summation=summation)

        return functools.update_wrapper(computed, compute)

    reason = "Compute repeated symbolic arithmetic once"
    patches = [
        Patch(SymNode, name, remembering(name, getattr(SymNode, name)), reason, in_all_threads=True)
        for name in _METHODS
    ]
    with patched(*patches):
        yield


def _identity(node: SymNode) -> tuple[Any, ...]:
    return node._expr, node.pytype, node._hint, node._optimized_summation
