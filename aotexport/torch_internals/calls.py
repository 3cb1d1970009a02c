"""Private names of torch for calls: declared dimensions, trees of arguments, fake tensors.

Importing them takes nothing beside torch. Those of `names.py` bring torch's compiler, which takes longer than torch.
"""

from __future__ import annotations

from typing import Any

import torch

# Fake tensors with a shape environment that knows the user's dynamic dimensions.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim

# Containers that torch's tree utilities know and this package does not (caches of model libraries).
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

__all__ = ["SUPPORTED_NODES", "FakeTensor", "FakeTensorMode", "tree_leaves", "tree_map"]

_HINT = type(Dim.AUTO)
"""The class of hints, the declarations without a name: `Dim.AUTO`, `Dim.DYNAMIC(min=2)`."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure of containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tells the memory of a tensor, real or fake, from others that live."""
    return tensor.untyped_storage()._cdata


def is_dimension(spec: Any) -> bool:
    """Return whether `spec` declares a size or an integer dynamic: a named dimension, `Dim.DYNAMIC` or `Dim.AUTO`."""
    return isinstance(spec, Dim | _HINT) and not is_fixed_dimension(spec)


def is_required_dimension(spec: Any) -> bool:
    """Return whether `spec` declares a dimension that must be dynamic: a named one, or `Dim.DYNAMIC`."""
    return is_dimension(spec) and getattr(spec, "type", None) is not Dim.AUTO.type


def is_fixed_dimension(spec: Any) -> bool:
    """Return whether `spec` declares a size or an integer fixed: `Dim.STATIC`, a number, or nothing at all."""
    return spec is None or isinstance(spec, int) or getattr(spec, "type", None) is Dim.STATIC.type
