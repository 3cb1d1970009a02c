"""Autocast around the captured call: it is no part of the model, and must not show in the captured graph.

Model code that reads dtypes may go another way under autocast. It does not where autocast leaves those dtypes alone.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Node

from aotexport.model.call import ExampleCall
from aotexport.model.programs import ProgramSpec
from aotexport.torch_internals.names import OpOverload, has_autocast_kernel
from aotexport_runtime.execution.autocast import autocast_dtype, under_autocast


def example_autocast(call: ExampleCall) -> Any:
    """Return the dtype of the autocast around the capture; None: there is none."""
    return autocast_dtype(_device_type(call))


def autocast_of(spec: ProgramSpec) -> AbstractContextManager[Any]:
    """Return a context with the autocast of a program; that of the caller stays if it has none of its own."""
    return contextlib.nullcontext() if spec.autocast is None else under_autocast(_device_type(spec.call), spec.autocast)


def other_autocast(call: ExampleCall) -> AbstractContextManager[Any]:
    """Return a context with autocast, or without if the capture is under autocast."""
    return under_autocast(_device_type(call), "bfloat16" if example_autocast(call) is None else None)


def _device_type(call: ExampleCall) -> str:
    found = [tensor for tensor in call.tensors if isinstance(tensor, torch.Tensor)]
    state = call.module.state_dict(keep_vars=True).values() if call.module is not None else ()
    return next((tensor.device.type for tensor in (*found, *state)), "cpu")


_PROMOTING = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
)
_WIDE = (torch.float32, torch.float64)


def leaves_dtypes_alone(call: ExampleCall, nodes: Iterable[Node | None]) -> bool:
    """Return whether values have the same dtypes with and without autocast around the call.

    Args:
        call: the example call; its device is that of autocast.
        nodes: of the values, in a forward graph whose composite operators are whole; None: of an unknown value.
    """
    read, device_type, known = list(nodes), _device_type(call), dict[Node, bool]()
    for node in next((each.graph.nodes for each in read if each is not None), ()):
        known[node] = _keeps_dtype(node, device_type, known)
    # A node that was erased is in no graph.
    return all(node is not None and known.get(node, False) for node in read)


def _keeps_dtype(node: Node, device_type: str, known: dict[Node, bool]) -> bool:
    """Return whether autocast cannot change the dtype of a node's value; `known`: answers for the nodes before it."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex():
        return True
    if node.op in ("placeholder", "get_attr"):
        return isinstance(value, torch.Tensor)
    if node.target is operator.getitem:
        return known[node.all_input_nodes[0]]
    if not isinstance(node.target, OpOverload) or has_autocast_kernel(node.target, device_type):
        return False
    if all(map(known.__getitem__, node.all_input_nodes)):
        return True
    dtype = getattr(value, "dtype", None)
    if any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values())):
        # A cast to the dtype that a tensor has returns the tensor itself, which autocast changes.
        return all(getattr(each.meta.get("val"), "dtype", None) != dtype for each in node.all_input_nodes)
    # Autocast changes float32 to a narrower dtype or back, and the widest operand gives the dtype of a sum.
    operands = [each.meta.get("val") for each in node.all_input_nodes if known[each]]
    wide = [each for each in operands if isinstance(each, torch.Tensor) and each.dim() > 0 and each.dtype in _WIDE]
    return node.target in _PROMOTING and any(each.dtype == dtype for each in wide)
