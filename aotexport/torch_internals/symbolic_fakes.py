"""Fake tensors with symbols for sizes that no argument of the user's has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._dynamo.source import ConstantSource

# Fake tensors with a shape environment that knows the user's dynamic dimensions.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext


def symbolic_fake(mode: FakeTensorMode, tensor: torch.Tensor, dynamic: Sequence[bool], name: str) -> torch.Tensor:
    """Return the fake of a contiguous tensor, with a symbol for each dynamic size.

    Args:
        mode: its fake mode.
        tensor: the tensor.
        dynamic: whether the size is dynamic, per axis.
        name: a name that no other tensor of the mode has.
    """
    kinds = [DimDynamic.DYNAMIC if is_dynamic else DimDynamic.STATIC for is_dynamic in dynamic]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)
