"""Indices of equal values: torch and ONNX Runtime may order these differently, and both are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from aotexport.lower.onnx.plain import plain
from aotexport.lower.onnx.rebuild import rebuild
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.onnx_calls import ORDERS, order_of
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import SizeArgument, TensorMeta
from aotexport_runtime.values.trees import leaves


@dataclass(frozen=True)
class _Order:
    """The value that an output of indices orders: a value of the graph, along an axis."""

    value: str
    meta: TensorMeta
    axis: int


def is_tie(bundle: Bundle, program: Program, values: Sequence[Any], path: str, got: Any) -> bool:
    """Return whether an output is indices in an order that differs from torch's only for exactly equal values.

    Args:
        bundle: of the program.
        program: its record; changes nothing.
        values: flat arguments of the call.
        path: of the output.
        got: ONNX Runtime's output.
    """
    taken = plain(bundle, program)
    places = {at: leaf.index for at, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)}
    index = places.get(path)
    order = None if index is None else _order(taken.graph, taken.graph.outputs[index])
    if index is None or order is None or not order.meta.shape:
        return False
    alone = msgspec.structs.replace(taken.graph, outputs=[order.value, taken.graph.outputs[index]])
    record = msgspec.structs.replace(taken.program, outputs=(order.meta, program.outputs[index]))
    namespaces = bundle.manifest.requirements.operator_namespaces
    with torch.no_grad():
        ordered, expected, *_ = rebuild(record, alone, taken.tensors, namespaces=namespaces).module(*values)
    got = torch.as_tensor(got)
    if expected.dtype != torch.int64 or (got.dtype, got.shape) != (expected.dtype, expected.shape) or not got.numel():
        return False
    if not _fits(got, ordered, order.axis):
        return False
    return torch.equal(ordered.gather(order.axis, expected), ordered.gather(order.axis, got))


def _fits(indices: torch.Tensor, ordered: torch.Tensor, axis: int) -> bool:
    """Return whether indices are positions along an axis, each at most once."""
    if int(indices.min()) < 0 or int(indices.max()) >= ordered.shape[axis]:
        return False
    steps = indices.sort(axis).values.diff(dim=axis)
    return bool((steps > 0).all())


def _order(graph: Graph, output: Any) -> _Order | None:
    metas = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    node = order_of(graph, output)
    if node is None:
        return None
    value, place = node.args[0], ORDERS[node.op]
    axis = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1)
    axis = axis.value if isinstance(axis, SizeArgument) else axis
    meta = metas.get(value) if isinstance(value, str) else None
    if not isinstance(axis, int) or not isinstance(value, str) or not isinstance(meta, TensorMeta):
        return None
    return _Order(value, meta, axis)
