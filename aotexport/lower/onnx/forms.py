"""Operators that torch's exporter or ONNX Runtime do not take as they are, in forms that they do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Call = Callable[..., fx.Node]
"""Adds a call of a function to a graph; returns its node."""

Ranks = list[int | None]
"""The number of axes per positional argument; None: it is no tensor."""

Form = Callable[[Call, list[Any], Mapping[str, Any], Ranks], fx.Node]
"""Adds to a graph what gives the result of an operator for arguments; returns the result."""


def _attention(call: Call, args: list[Any], kwargs: Mapping[str, Any], ranks: Ranks) -> fx.Node:
    """Return attention in four axes, the only form that torch's exporter translates."""
    missing = 4 - (ranks[0] or 4)
    for _ in range(missing):
        args = [*(call(aten.unsqueeze.default, value, 0) for value in args[:3]), *args[3:]]
    result = call(aten.scaled_dot_product_attention.default, *args, **kwargs)
    for _ in range(missing):
        result = call(aten.squeeze.dim, result, 0)
    return result


def _product(call: Call, args: list[Any], kwargs: Mapping[str, Any], ranks: Ranks) -> fx.Node:
    """Return a product with a vector as one with a matrix of one row or column.

    An optimisation of ONNX Runtime (1.31, `MatmulTransposeFusion`) forgets that the other factor is transposed.
    """
    left, right = args
    if ranks[0] == 1 != ranks[1]:
        return call(aten.squeeze.dim, call(aten.matmul.default, call(aten.unsqueeze.default, left, 0), right), -2)
    if ranks[1] == 1 != ranks[0]:
        return call(aten.squeeze.dim, call(aten.matmul.default, left, call(aten.unsqueeze.default, right, 1)), -1)
    return call(aten.matmul.default, left, right)


def _sort(call: Call, args: list[Any], kwargs: Mapping[str, Any], ranks: Ranks) -> fx.Node:
    """Return a sort; those of ONNX are stable."""
    return call(aten.sort.default, *args, **{name: value for name, value in kwargs.items() if name != "stable"})


def _masked_select(call: Call, args: list[Any], kwargs: Mapping[str, Any], ranks: Ranks) -> fx.Node:
    """Return the elements at which a mask is true."""
    both = call(aten.broadcast_tensors.default, args)
    value, mask = (call(operator.getitem, both, index) for index in (0, 1))
    return call(aten.index.Tensor, value, [mask])


FORMS: dict[str, Form] = {
    "aten::scaled_dot_product_attention.default": _attention,
    "aten::mv.default": _product,
    "aten::matmul.default": _product,
    "aten::sort.stable": _sort,
    "aten::masked_select.default": _masked_select,
}
"""By operator."""
