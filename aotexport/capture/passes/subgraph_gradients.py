"""Gradients of branches and loops, of which torch's differ from those of what they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from aotexport.capture.passes.subgraphs import bodies, is_operator
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import source_of
from aotexport.torch_internals.names import OpOverload

# `torch._higher_order_ops`, torch 2.13: their backward runs the forward function once more, without its generator's
# state (`aotexport_runtime/engines/redrawn.py`). `scan` keeps what its forward computed.
_DRAWN_ANEW = ("cond", "while_loop", "map_impl")


def refuse_nested_bodies_that_draw(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse gradients through draws of a branch or loop inside of another, whose order in backward torch decides.

    Args:
        graph: a forward graph of a program that records gradients.
        inputs: what its placeholders stand for.

    Raises:
        ExportFailed: names the operator and the user's line.
    """
    differentiable = _differentiable(graph, inputs)
    for node in graph.graph.nodes:
        if node not in differentiable or not is_operator(node):
            continue
        inner = next((inner for body in bodies(graph, node) for inner in _nested(body, node)), None)
        if inner is None:
            continue
        line = source_of(node.meta.get("stack_trace"), None)
        where = f"{line.file}:{line.line}: in {line.function}: " if line else ""
        raise ExportFailed(
            f"{where}`{_name(inner)}` inside of `{_name(node)}` draws random numbers on the way to gradients; its "
            "backward in torch draws others, in an order that a bundle cannot keep. Draw before it, and pass the "
            "numbers in"
        )


def asked_of_arguments(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> set[Literal["layout", "requires_grad"]]:
    """Return what gradients that go through a `while_loop` depend on in torch, beside values; see `Program.fixed`.

    Values that begin without requiring grad carry none from step to step (`WhileLoopAutogradOp`), and where the loop
    draws, its backward draws for contiguous ones.
    """
    loops = [n for n in _differentiable(graph, inputs) if is_operator(n) and _name(n) == "while_loop"]
    if any(_draws(body) for loop in loops for body in bodies(graph, loop)):
        return {"layout", "requires_grad"}
    return {"requires_grad"} if loops else set()


def _nested(body: torch.fx.GraphModule, outer: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield what `body` runs that has bodies and draws, where torch's backward of it or of `outer` draws anew."""
    for node in body.graph.nodes:
        if is_operator(node) and any(map(_draws, bodies(body, node))):
            if not {outer.target.name(), node.target.name()}.isdisjoint(_DRAWN_ANEW):  # type: ignore[union-attr]
                yield node
            for inner in bodies(body, node):
                yield from _nested(inner, node)


def _name(node: torch.fx.Node) -> str:
    return node.target.name().removesuffix("_impl")  # type: ignore[union-attr]


def _draws(body: torch.fx.GraphModule) -> bool:
    return any(
        (isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)
        or any(map(_draws, bodies(body, node)))
        for node in body.graph.nodes
    )


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
