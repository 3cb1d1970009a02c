"""The example call in other sizes: a dynamic size of 0 or 1 is enlarged for the trace.

With one row, layouts say nothing about rows, broadcasting hides them, and operators take special paths, so a trace
would hold for one row only. The trace gets more rows instead, and is then checked to hold for the example too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.model.call import ExampleCall
from aotexport.torch_internals.calls import is_required_dimension
from aotexport_runtime.values.subclasses import is_wrapper

_ROOTS = (4, 3, 2, 6, 8)
"""Sizes to try, the first that all ranges allow."""


def larger_tensors(call: ExampleCall) -> list[Any] | None:
    """Return substitutes for the call's tensors in which no dynamic size is 0 or 1.

    Returns:
        Contiguous tensors without values; None: no such size, or the example's layout or aliases matter.
    """
    declared = _dynamic_sizes(call)
    small = {size.root for size in declared if size.example < 2}
    to_change = [size for size in declared if size.root in small]
    plain = all(_is_plain(leaf) for leaf in call.tensors) and not _share_memory(call.tensors)
    if not plain or any(size.axis is None for size in to_change):
        return None
    for root in _ROOTS if to_change else ():
        sizes = {(size.argument, size.axis): size.at(root) for size in to_change}
        if all(size.allows(root) for size in to_change):
            return [_resized(leaf, sizes, index) for index, leaf in enumerate(call.tensors)]
    return None


def calls_of_other_sizes(call: ExampleCall) -> list[ExampleCall]:
    """Return the call with twice and with half of each dynamic size, in rows of the example, as the ranges allow."""
    declared = _dynamic_sizes(call)
    roots = {size.root: size.example_root for size in declared}
    calls: list[ExampleCall] = []
    for more in (2, 0.5):
        allowed = {
            root: at
            for root, example in roots.items()
            if (at := int(example * more)) and all(size.allows(at, least=1) for size in declared if size.root == root)
        }
        tensors = list(call.tensors)
        for size in declared:
            leaf, length = tensors[size.argument], size.at(allowed.get(size.root, size.example_root))
            rows = torch.arange(length) % max(size.example, 1)
            tensors[size.argument] = length if size.axis is None else _rows(leaf, size.axis, rows)
        calls += [replace(call, tensors=tensors)] if allowed else []
    return calls


def _rows(leaf: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    return leaf.detach().index_select(axis, rows.to(leaf.device)).requires_grad_(leaf.requires_grad)


@dataclass(frozen=True)
class _DeclaredSize:
    """A size that was declared dynamic: axis `axis` of an argument, or, with None, an integer."""

    argument: int
    axis: int | None
    example: int
    dimension: Any

    @property
    def root(self) -> Any:
        """The key of sizes that change together: the name of their root, or else the size's own place."""
        return getattr(getattr(self.dimension, "root", self.dimension), "__name__", (self.argument, self.axis))

    @property
    def example_root(self) -> int:
        """The example's value of the root."""
        return next((root for root in range(self.example + 1) if self.at(root) == self.example), self.example)

    def at(self, root: int) -> int:
        return self.dimension.fn(root) if hasattr(self.dimension, "root") else root

    def allows(self, root: int, least: int = 2) -> bool:
        named = getattr(self.dimension, "root", self.dimension)
        low, high = getattr(named, "min", None), getattr(named, "max", None)
        return self.at(root) >= least and (low is None or root >= low) and (high is None or root <= high)


def _dynamic_sizes(call: ExampleCall) -> list[_DeclaredSize]:
    found: list[_DeclaredSize] = []
    for index, (leaf, axes) in enumerate(zip(call.tensors, call.axes, strict=True)):
        is_tensor = isinstance(leaf, torch.Tensor)
        for axis, dimension in (axes or {}).items():
            if is_required_dimension(dimension):
                at = (axis, leaf.shape[axis]) if is_tensor else (None, 2)
                found.append(_DeclaredSize(index, *at, dimension))
    return found


def _is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (not is_wrapper(leaf) and leaf.is_contiguous())


def _share_memory(leaves: Sequence[Any]) -> bool:
    memories = [leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return len(set(memories)) < len(memories)


def _resized(leaf: Any, sizes: dict[tuple[int, int | None], int], index: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or not any(place[0] == index for place in sizes):
        return leaf
    shape = [sizes.get((index, axis), size) for axis, size in enumerate(leaf.shape)]
    made = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
    return made if leaf.is_leaf else made.clone()


def holds_for(call: ExampleCall, capture: ForwardCapture) -> bool:
    """Return whether a trace of larger tensors holds for the example itself."""
    environment = capture.fakes.mode.shape_env
    assert environment is not None
    sizes: dict[Any, int] = {}
    for binding, fake in zip(capture.bindings, capture.inputs, strict=True):
        if binding.argument is None or not isinstance(fake, torch.Tensor):
            continue
        for size, example in zip(fake.shape, call.tensors[binding.argument].shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sizes[size.node.expr] = example
    return all(guard.expr.subs(sizes) in (sympy.true, True) for guard in environment.guards)
