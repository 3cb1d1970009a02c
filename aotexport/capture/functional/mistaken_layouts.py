"""Operators whose results have other strides in eager than as fake tensors, for arguments that are not row by row.

Torch computes fake results of these by Python functions, which follow other rules than their kernels. The forward graph
runs the kernels; a functional graph would return the other strides, or take for a copy what is a view in eager.

Source: torch 2.13, `torch/_refs/__init__.py`, `torch/_decomp/decompositions.py`, `torch/_meta_registrations.py`, each
beside its kernel in `aten/src/ATen/native`; found by comparing the samples of `torch.testing`'s operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_arg

from aotexport.torch_internals.calls import tree_map
from aotexport.torch_internals.general_sizes import is_row_major
from aotexport.torch_internals.names import OpOverload

_TAKEN_APART = frozenset(
    f"aten::{name}"
    for name in (
        *("copysign", "div", "floor_divide", "heaviside", "logaddexp", "logaddexp2", "logical_and", "logical_or"),
        *("logical_xor", "special_xlog1py", "xlogy", "channel_shuffle", "max_pool1d", "max_unpool2d", "one_hot"),
    )
)
"""Operators of which a functional graph has others in their place."""

_KEPT = frozenset(
    f"aten::{name}"
    for name in (
        *("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "ldexp", "normal"),
    )
)
"""Operators whose kernel a functional graph runs as well: only what follows may go by the mistaken strides."""


def mistaken_layout(graph: torch.fx.Graph) -> str | None:
    """Return an operator whose strides at the trace a functional graph would go by, though eager has others."""
    nodes = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    writes = any(node.target._schema.is_mutable for node in nodes)
    for node in nodes:
        name = node.target._schema.name
        if (name in _TAKEN_APART or (writes and name in _KEPT)) and _is_mistaken(node):
            return str(node.target)
    return None


def _is_mistaken(node: torch.fx.Node) -> bool:
    """Return whether the result at the trace is laid out otherwise than eager's for arguments like the example's.

    So it is for arguments that cannot be made, or that the operator refuses.
    """
    target: Any = node.target
    value: Any = node.meta.get("val")
    given = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    on_cpu = isinstance(value, torch.Tensor) and all(each.device.type == "cpu" for each in (value, *tensors))
    if not on_cpu or all(map(is_row_major, tensors)):
        return False
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda taken: taken.meta["val"])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = target(*tree_map(_real, args), **tree_map(_real, kwargs))
        shape, known = [_number(size) for size in value.shape], [_number(step) for step in value.stride()]
    except (RuntimeError, IndexError, ValueError):
        return True
    axes = zip(shape, known, result.stride(), strict=True)
    return any(size > 1 and one != other for size, one, other in axes)


def _real(value: Any) -> Any:
    """Return a tensor of zeros like a fake one, with the example's sizes; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return _number(value) if isinstance(value, torch.SymInt) else value
    shape, stride = [_number(size) for size in value.shape], [_number(step) for step in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype)
    return made.zero_()


def _number(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        if not size.node.has_hint():
            raise ValueError("a size depends on values")
        return size.node.hint
    return size
