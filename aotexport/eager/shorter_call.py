"""The example call with shorter dynamic axes, for questions whose answer is the same at every size."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from aotexport.model.call import ExampleCall
from aotexport.torch_internals.calls import is_dimension
from aotexport_runtime.values.subclasses import is_wrapper

_SIZE = 4
"""Size of the shorter axes: kernels take little time, and small windows fit."""


def shorter_call(call: ExampleCall) -> ExampleCall | None:
    """Return the call with the first elements along each dynamic axis.

    Args:
        call: the example call. Its sizes may be related, as `2 * batch` is to `batch`; the returned call may not run
            then.

    Returns:
        The call, or None where no axis is longer, and where a copy of an argument is unlike it: arguments that share
        memory, and results of other operations in a graph of autograd.
    """
    own = [leaf for leaf in call.tensors if isinstance(leaf, torch.Tensor) and not is_wrapper(leaf)]
    memory = {leaf.untyped_storage().data_ptr() for leaf in own if leaf.layout is torch.strided and leaf.numel()}
    if len(memory) < len(own) or not all(leaf.is_leaf for leaf in own):
        return None
    tensors = [_shorter(leaf, axes or {}) for leaf, axes in zip(call.tensors, call.axes, strict=True)]
    if all(map(operator.is_, tensors, call.tensors)):
        return None
    args, kwargs = call.rebuild(tensors)
    return dataclasses.replace(call, args=args, kwargs=kwargs, tensors=tensors)


def _shorter(leaf: Any, axes: dict[int, Any]) -> Any:
    if not isinstance(leaf, torch.Tensor) or is_wrapper(leaf):
        return leaf
    cut = leaf.detach()
    for axis, dimension in axes.items():
        if is_dimension(dimension):
            cut = cut.narrow(axis, 0, min(_SIZE, leaf.shape[axis]))
    if cut.shape == leaf.shape:
        return leaf
    # A clone keeps the order of the axes in memory, without the gaps.
    return cut.clone().requires_grad_(leaf.requires_grad)
