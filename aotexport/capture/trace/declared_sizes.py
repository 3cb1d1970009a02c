"""The sizes of the example call that were declared dynamic, and the call in other sizes.

With one row, layouts say nothing about rows, broadcasting hides them, and operators take special paths, so a trace
would hold for one row only. The trace gets more rows instead, and is then checked to hold for the example too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.export import Dim

from aotexport.errors import ModelFileInvalid
from aotexport.model.call import ExampleCall
from aotexport.torch_internals.calls import is_dimension, is_required_dimension, memory_of
from aotexport.torch_internals.names import int_oo
from aotexport_runtime.values.subclasses import is_wrapper

_ROOTS = (4, 3, 2, 6, 8)
"""Sizes to try, the first that all ranges allow."""


@dataclass(frozen=True)
class DeclaredSize:
    """A declared size, `factor * root + offset`: axis `axis` of an argument, or, with None, an integer at `path`."""

    argument: int
    axis: int | None
    example: int
    dimension: Any
    path: str

    def __str__(self) -> str:
        return place(self.path, self.axis)

    @property
    def name(self) -> str | None:
        """The name of the root; None: a hint (`Dim.AUTO`)."""
        return getattr(getattr(self.dimension, "root", self.dimension), "__name__", None)

    @property
    def root(self) -> Any:
        """The key of sizes that change together."""
        return self.name or (self.argument, self.axis)

    @property
    def offset(self) -> int:
        """The size where the root is 0."""
        return self.dimension.fn(0) if hasattr(self.dimension, "root") else 0

    @property
    def factor(self) -> int:
        """What the size grows by with the root."""
        return self.at(1) - self.offset

    def at(self, root: int) -> int:
        """Return the size for a value of the root."""
        return self.dimension.fn(root) if hasattr(self.dimension, "root") else root

    def root_of(self, size: Any) -> Any:
        """Return the value of the root for the size."""
        return (size - self.offset) // self.factor

    @property
    def is_required(self) -> bool:
        """Whether it must be dynamic, rather than may be."""
        return is_required_dimension(self.dimension)

    def allows(self, root: int, least: int = 2) -> bool:
        """Return whether the range of the root has a value, for which the size is not below `least`."""
        low, high = range_of(getattr(self.dimension, "root", self.dimension))
        return self.at(root) >= least and (low is None or root >= low) and (high is None or root <= high)

    def among(self, values: Sequence[Any]) -> Any:
        """Return the size in values like the call's tensors."""
        return values[self.argument] if self.axis is None else values[self.argument].shape[self.axis]


def declared_sizes(call: ExampleCall) -> list[DeclaredSize]:
    """Return the sizes that were declared dynamic, by name or hint, in order.

    Raises:
        ModelFileInvalid: a range is without the example's size.
    """
    found = [
        DeclaredSize(index, *((axis, leaf.shape[axis]) if isinstance(leaf, torch.Tensor) else (None, leaf)), spec, path)
        for index, (leaf, axes, path) in enumerate(zip(call.tensors, call.axes, call.paths, strict=True))
        for axis, spec in (axes or {}).items()
        if is_dimension(spec)
    ]
    for size in found:
        low, high = range_of(size.dimension)
        if (low is not None and size.example < low) or (high is not None and size.example > high):
            raise ModelFileInvalid(
                f"dynamic_shapes: `{size}` is {size.example} in the example inputs, "
                f"outside of [{'' if low is None else low}:{'' if high is None else high}]"
            )
    return found


def constrain(declared: Iterable[DeclaredSize], fakes: Sequence[Any]) -> None:
    """Let the shape environment of fakes assume the relations of the user's names, then the user's ranges.

    Torch gets hints in place of names: of a range that leaves it one size it would relate no sizes. Names relate sizes
    by equality, or `2 * half` where derived; calls must meet that even where the model does not need it.

    Raises:
        ModelFileInvalid: the example's sizes are not so related.
    """
    declared, named = list(declared), dict[str, list[DeclaredSize]]()
    for size in declared:
        if size.name is not None:
            named.setdefault(size.name, []).append(size)
    for name, sizes in named.items():
        first, *others = sorted(sizes, key=lambda size: (size.factor, abs(size.offset)))
        torch._check((first.among(fakes) - first.offset) % first.factor == 0)
        for other in others:
            expected = _related(first, other, first.example)
            if other.example != expected:
                raise ModelFileInvalid(
                    f"dynamic_shapes: {_where(first)} is {first.example} in the example inputs, so with the dimension "
                    f"`{name}` {_where(other)} must be {expected}; it is {other.example}"
                )
            torch._check(other.among(fakes) == _related(first, other, first.among(fakes)))
    for size in declared:
        symbol = size.among(fakes)
        if isinstance(symbol, torch.SymInt) and isinstance(symbol.node.expr, sympy.Symbol):
            low, high = range_of(size.dimension)
            bounds = (-int_oo if low is None else low, int_oo if high is None else high)
            symbol.node.shape_env.constrain_symbol_range(symbol.node.expr, *bounds)


def _related(one: DeclaredSize, other: DeclaredSize, size: Any) -> Any:
    """Return the other size where the first is `size`."""
    same = (one.factor, one.offset) == (other.factor, other.offset)
    return size if same else other.factor * one.root_of(size) + other.offset


def _where(size: DeclaredSize) -> str:
    return f"`{size.path}`" if size.axis is None else f"axis {size.axis} of `{size.path}`"


def torch_specs(call: ExampleCall) -> list[Any]:
    """Return the dimensions per argument as hints, which torch takes for integers too; see `constrain`."""

    def hint(dimension: Any) -> Any:
        if not is_dimension(dimension):
            return dimension
        return Dim.DYNAMIC if is_required_dimension(dimension) else Dim.AUTO

    return [
        axes
        and ({axis: hint(each) for axis, each in axes.items()} if isinstance(leaf, torch.Tensor) else hint(axes[0]))
        for leaf, axes in zip(call.tensors, call.axes, strict=True)
    ]


def range_of(dimension: Any) -> tuple[int | None, int | None]:
    """Return the least and greatest value of the user's dimension; None: there is none.

    Torch refuses to give the bounds of a derived dimension below 0, which an integer may have.
    """
    root = getattr(dimension, "root", dimension)
    bounds = (getattr(root, bound, None) for bound in ("min", "max"))
    known = (int(bound) if isinstance(bound, int) else None for bound in bounds)
    low, high = known if root is dimension else (None if bound is None else dimension.fn(bound) for bound in known)
    return low, high


def place(path: str, axis: int | None) -> str:
    """Return the Python expression of a size (an integer, with no axis) of the call."""
    return path if axis is None else f"{path}.shape[{axis}]"


def larger_tensors(call: ExampleCall) -> list[Any] | None:
    """Return substitutes for the call's tensors in which no dynamic size is 0 or 1.

    Returns:
        Contiguous tensors without values; None: no such size, or the example's layout or aliases matter.
    """
    declared = [size for size in declared_sizes(call) if size.is_required]
    small = {size.root for size in declared if size.axis is not None and size.example < 2}
    to_change = [size for size in declared if size.root in small]
    tensors = [leaf for leaf in call.tensors if isinstance(leaf, torch.Tensor)]
    plain = len(set(map(memory_of, tensors))) == len(tensors)
    plain &= all(not is_wrapper(each) and each.is_contiguous() for each in tensors)
    if not plain or any(size.axis is None for size in to_change):
        return None
    for root in _ROOTS if to_change else ():
        sizes = {(size.argument, size.axis): size.at(root) for size in to_change}
        if all(size.allows(root) for size in to_change):
            return [_resized(leaf, sizes, index) for index, leaf in enumerate(call.tensors)]
    return None


def calls_of_other_sizes(call: ExampleCall) -> list[ExampleCall]:
    """Return the call with twice and with half of each dynamic size, in rows of the example, as the ranges allow."""
    declared = [size for size in declared_sizes(call) if size.is_required]
    roots = {size.root: size.root_of(size.example) for size in declared}
    calls: list[ExampleCall] = []
    for more in (2, 0.5):
        allowed = {
            root: at
            for root, example in roots.items()
            if (at := int(example * more)) and all(size.allows(at, least=1) for size in declared if size.root == root)
        }
        tensors = list(call.tensors)
        for size in declared:
            leaf, length = tensors[size.argument], size.at({**roots, **allowed}[size.root])
            rows = torch.arange(length) % max(size.example, 1)
            tensors[size.argument] = length if size.axis is None else _rows(leaf, size.axis, rows)
        calls += [replace(call, tensors=tensors)] if allowed else []
    return calls


def _rows(leaf: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    return leaf.detach().index_select(axis, rows.to(leaf.device)).requires_grad_(leaf.requires_grad)


def _resized(leaf: Any, sizes: dict[tuple[int, int | None], int], index: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or not any(place[0] == index for place in sizes):
        return leaf
    shape = [sizes.get((index, axis), size) for axis, size in enumerate(leaf.shape)]
    made = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
    return made if leaf.is_leaf else made.clone()
