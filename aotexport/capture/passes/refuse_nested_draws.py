"""Refuse random numbers drawn in a branch or loop inside of another, in programs with gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.subgraph_gradients import differentiable_operators, draws, operator_name
from aotexport.capture.passes.subgraphs import is_operator, subgraphs_of
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import source_of

# `torch._higher_order_ops`, torch 2.13: their backward runs the forward function once more, without its generator's
# state (`aotexport_runtime/execution/redrawn.py`). `scan` saves the results of its forward.
_DRAWN_ANEW = ("cond", "while_loop", "map_impl")


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS, Fact.CODE_USED], only_grad=True)
def refuse_nested_draws(draft: Draft) -> Draft:
    """Refuse gradients through draws of a branch or loop inside of another: torch decides their order in backward.

    Raises:
        ExportFailed: names the operator and the user's line.
    """
    for node in differentiable_operators(draft.graph, draft.inputs):
        inner = next((inner for subgraph in subgraphs_of(draft.graph, node) for inner in _nested(subgraph, node)), None)
        if inner is None:
            continue
        line = source_of(node.meta.get("stack_trace"), None)
        where = f"{line.file}:{line.line}: in {line.function}: " if line else ""
        raise ExportFailed(
            f"{where}`{operator_name(inner)}` inside of `{operator_name(node)}` draws random numbers on the way to "
            "gradients; its backward in torch draws others, in an order that a bundle cannot keep. Draw before it, and "
            "pass the numbers in"
        )
    return draft


def _nested(subgraph: torch.fx.GraphModule, outer: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield drawing operators with subgraphs in `subgraph`, where their backward or that of `outer` draws anew."""
    for node in subgraph.graph.nodes:
        if is_operator(node) and any(map(draws, subgraphs_of(subgraph, node))):
            if not {outer.target.name(), node.target.name()}.isdisjoint(_DRAWN_ANEW):  # type: ignore[union-attr]
                yield node
            for inner in subgraphs_of(subgraph, node):
                yield from _nested(inner, node)
