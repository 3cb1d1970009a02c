"""Indices that depend on data: clamped to their bounds, with a result that says whether any was outside.

An error in a compiled loop would end the process. A library therefore never raises one: indices are clamped, and one
more result says whether that changed any. If it did, the other results mean nothing, and the graph runs instead, whose
operators raise eager's error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aotexport.torch_internals.calls import FakeTensorMode

aten = torch.ops.aten

_ALONG_AN_AXIS = (
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
"""Operators `(operand, axis, index, ...)`, whose indices are never negative."""

_BY_SEVERAL = (aten.index.Tensor, aten.index_put.default)
"""Operators `(operand, indices, ...)`, whose negative indices count from the end."""


def hold_indices(module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> bool:
    """Clamp the indices in a traced graph, and return one more result that says whether any was outside of its bounds.

    Args:
        module: result of `trace_decomposed`; changed.
        fake_mode: fake mode of its values.

    Returns:
        Whether it has such indices; if not, there is no further result.
    """
    outside_bounds: list[torch.fx.Node] = []
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        call = _Inserter(module.graph, node, fake_mode)
        for position, place, axis, wraps in _indices(node):
            operand: Any = node.args[0]
            index: Any = node.args[position] if place is None else node.args[position][place]  # type: ignore[index]
            clamped = _clamped(call, operand, index, axis, wraps)
            outside_bounds.append(call(aten.any.dims, call(aten.ne.Tensor, clamped, index)))
            if place is None:
                node.update_arg(position, clamped)
            else:
                indices: Any = list(node.args[position])  # type: ignore[call-overload]
                indices[place] = clamped
                node.update_arg(position, indices)
    if not outside_bounds:
        return False
    (output,) = module.graph.find_nodes(op="output")
    call = _Inserter(module.graph, output, fake_mode)
    outside = outside_bounds[0]
    for other in outside_bounds[1:]:
        outside = call(aten.logical_or.default, outside, other)
    output.update_arg(0, (*output.args[0], outside))
    module.recompile()
    return True


def _indices(node: torch.fx.Node) -> Iterator[tuple[int, int | None, int, bool]]:
    """Yield, per tensor of indices: position of the argument, place in it, axis of the operand, whether it may wrap."""
    operand: Any = node.args[0] if node.args else None
    if node.target is aten.embedding.default:
        yield 1, None, 0, False
    elif node.target in _ALONG_AN_AXIS:
        axis: Any = node.args[1]
        rank = operand.meta["val"].dim()
        if rank:
            yield 2, None, axis % rank, False
    elif node.target in _BY_SEVERAL:
        indices: Any = node.args[1]
        for place, index in enumerate(indices):
            if index is not None and index.meta["val"].dtype not in (torch.bool, torch.uint8):
                yield 1, place, place, True


def _clamped(call: _Inserter, operand: Any, index: Any, axis: int, wraps: bool) -> torch.fx.Node:
    size: Any = operand.meta["val"].shape[axis]
    if isinstance(size, int):
        return call(
            aten.clamp_max.default, call(aten.clamp_min.default, index, -size if wraps else 0), max(size - 1, 0)
        )
    size = call(aten.sym_size.int, operand, axis)
    low = call(operator.neg, size) if wraps else 0
    return call(aten.clamp_max.default, call(aten.clamp_min.default, index, low), call(operator.sub, size, 1))


class _Inserter:
    """Inserts calls before a node, with their metadata."""

    def __init__(self, graph: torch.fx.Graph, before: torch.fx.Node, fake_mode: FakeTensorMode) -> None:
        self._graph = graph
        self._before = before
        self._mode = fake_mode

    def __call__(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        values = [argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument for argument in args]
        with self._mode:
            node.meta["val"] = target(*values)
        return node
