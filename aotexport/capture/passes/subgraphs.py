"""Operators that take functions: their subgraphs, and the facts that gradients through them depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotexport.capture.passes.contract import Draft, Fact, graph_pass
from aotexport.torch_internals.names import HigherOrderOperator, OpOverload


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS, Fact.CODE_USED], only_grad=True)
def fix_gradients_of_loops(draft: Draft) -> Draft:
    """Fix the facts beside values that gradients through a `while_loop` depend on in torch; see `Program.fixed`.

    Values that begin without requiring grad carry none from step to step (`WhileLoopAutogradOp`). The backward of a
    loop that draws random numbers draws them for contiguous values.
    """
    loops = [n for n in differentiable_operators(draft.graph, draft.inputs) if operator_name(n) == "while_loop"]
    reads = draft.reads
    if loops:
        reads |= {"requires_grad"}
    if any(draws(subgraph) for loop in loops for subgraph in subgraphs_of(draft.graph, loop)):
        reads |= {"layout"}
    return replace(draft, reads=reads)


def is_operator(node: torch.fx.Node) -> bool:
    """Return whether a node calls an operator that takes functions."""
    return isinstance(node.target, HigherOrderOperator)


def subgraphs_of(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.GraphModule]:
    """Yield the subgraphs that a node of `graph` runs."""
    for operand in node.all_input_nodes:
        subgraph = getattr(graph, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(subgraph, torch.fx.GraphModule):
            yield subgraph


def operator_name(node: torch.fx.Node) -> str:
    """Return the user's name of the higher-order operator that a node calls."""
    return node.target.name().removesuffix("_impl")  # type: ignore[union-attr]


def draws(subgraph: torch.fx.GraphModule) -> bool:
    """Return whether a graph, or one of its subgraphs, draws random numbers."""
    return any(
        (isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)
        or any(map(draws, subgraphs_of(subgraph, node)))
        for node in subgraph.graph.nodes
    )


def differentiable_operators(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[torch.fx.Node]:
    """Return the operators with functions that are computed from `inputs` that require grad, other than by `detach`."""
    placeholders = zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
    found = {node for node, value in placeholders if isinstance(value, torch.Tensor) and value.requires_grad}
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.detach.default and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return [node for node in graph.graph.nodes if node in found and is_operator(node)]
