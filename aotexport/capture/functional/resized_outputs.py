"""Operators that give a tensor another shape to write their result to (`torch.add(x, y, out=z)`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from aotexport.torch_internals.names import OpOverload, statically_known_true


def resizes_input(graph: torch.fx.Graph) -> str | None:
    """Return an operator that gives another shape to an input, or to a view of one; None: there is none.

    AOTAutograd writes the result to the input, and leaves the input's shape as it was.
    """
    inputs = {value.untyped_storage()._cdata for node in graph.find_nodes(op="placeholder") for value in _tensors(node)}
    for node in graph.nodes:
        for written, result in _outputs(node):
            alike = written.dim() == result.dim()
            sizes = zip(written.shape, result.shape, strict=False)
            if not (alike and all(statically_known_true(one == other) for one, other in sizes)):
                memory = result.untyped_storage()._cdata
                if memory in inputs:
                    return str(node.target)
    return None


def _outputs(node: torch.fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors that a node is given for its results, each with the result."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return
    results = _tensors(node)
    outputs = [argument.name for argument in node.target._schema.arguments if argument.is_out]
    for name, result in zip(outputs, results, strict=False):
        given = node.kwargs.get(name)
        if isinstance(given, torch.fx.Node):
            yield from ((value, result) for value in _tensors(given))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, torch.Tensor)]
