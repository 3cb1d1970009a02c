"""Random numbers in functions that branches and loops run: torch's backward of some draws them anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aotexport.capture.sources import source_of
from aotexport.errors import ExportFailed
from aotexport.torch_internals.names import HigherOrderOperator, OpOverload

# `torch._higher_order_ops`, torch 2.13: their backward runs the forward function once more, without its generator's
# state. `scan` keeps what its forward computed.
_DRAWN_ANEW = ("cond", "while_loop", "map_impl")


def refuse_bodies_that_draw(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse gradients through random numbers that eager's own backward does not know.

    Args:
        graph: a forward graph of a program that records gradients.
        inputs: what its placeholders stand for.

    Raises:
        ExportFailed: a branch or loop whose results need gradients draws; names the operator and the user's line.
    """
    differentiable = _differentiable(graph, inputs)
    for node in graph.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _DRAWN_ANEW:
            continue
        drawing = next((inner for body in _bodies(graph, node) for inner in _draws(body)), None)
        if drawing is None or node not in differentiable:
            continue
        line = source_of(node.meta.get("stack_trace"), None)
        where = f"{line.file}:{line.line}: in {line.function}: " if line else ""
        raise ExportFailed(
            f"{where}`{node.target.name().removesuffix('_impl')}` draws random numbers (`{drawing.target}`) on the way "
            "to gradients, and its backward in torch draws others, so that the gradients belong to another result. "
            "Draw before it, and pass the numbers in"
        )


def _bodies(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.GraphModule]:
    for operand in node.all_input_nodes:
        body = getattr(graph, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            yield body


def _draws(body: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for node in body.graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            yield node
        for inner in _bodies(body, node):
            yield from _draws(inner)


def _differentiable(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> set[torch.fx.Node]:
    """Return the nodes that are computed from inputs that need gradients, not through `detach`."""
    found: set[torch.fx.Node] = set()
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            found.add(node)
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.detach.default and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
