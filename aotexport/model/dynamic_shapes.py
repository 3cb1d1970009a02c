"""`dynamic_shapes` in the form of `torch.export.export`, nested like the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, Sequence, Tree
from aotexport_runtime.values.trees import keys_of


def nested_sizes(tree: Tree, size_of: Callable[[Leaf | Constant], Any]) -> Any:
    """Return what `size_of` gives for the inputs of a tree, nested like it: sizes by axis, an integer's, or None."""
    if isinstance(tree, Leaf | Constant):
        return size_of(tree)
    children = [nested_sizes(item, size_of) for item in tree.items]
    if isinstance(tree, Sequence):
        return tuple(children)
    return dict(zip(keys_of(tree) if isinstance(tree, Mapping) else tree.fields, children, strict=True))


def scaled(dimension: Any, factor: int, offset: int) -> Any:
    """Return the dimension `factor * dimension + offset`, as `torch.export.Dim` derives it."""
    multiple = dimension if factor == 1 else factor * dimension
    return multiple + offset if offset else multiple
