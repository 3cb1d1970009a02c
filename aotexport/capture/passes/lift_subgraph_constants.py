"""Turn tensors that subgraphs close over, such as `torch.tensor(2.0)` in a branch, into operands."""

from __future__ import annotations

import itertools

import torch

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.subgraphs import is_operator, new_placeholder, subgraphs_of
from aotexport.torch_internals.calls import FakeTensor


@graph_pass(guarantees=[Fact.SUBGRAPHS_CLOSED])
def lift_subgraph_constants(draft: Draft) -> Draft:
    """Turn tensors that subgraphs close over into operands of their operators; the main graph closes over them then.

    The operators are those whose last argument holds the operands that their subgraphs take last: `cond`, `while_loop`,
    `scan`, `map` (torch 2.13, `torch/_higher_order_ops/`).
    """
    _lift(draft.graph)
    return draft


def _lift(graph: torch.fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        run = list(subgraphs_of(graph, node)) if is_operator(node) else []
        if run:
            # The bodies of a `while_loop` themselves show what they write to.
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "mutated_arg_indices"}
        if not run or not isinstance(node.args[-1], list | tuple):
            continue
        operands = list(node.args[-1])
        for subgraph in run:
            _lift(subgraph)
        for owner, constant in [(subgraph, constant) for subgraph in run for constant in _constants(subgraph)]:
            operands.append(_attribute(graph, node, constant, getattr(owner, str(constant.target))))
            name, value = f"constant_{len(operands)}", constant.meta["val"]
            placeholders = {other: new_placeholder(other, name, value) for other in run}
            constant.replace_all_uses_with(placeholders[owner])
            owner.graph.erase_node(constant)
        node.update_arg(len(node.args) - 1, tuple(operands))
        for subgraph in run:
            subgraph.recompile()


def _constants(subgraph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    attributes = [
        (node, getattr(subgraph, str(node.target), None)) for node in subgraph.graph.find_nodes(op="get_attr")
    ]
    return [node for node, value in attributes if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)]


def _attribute(
    graph: torch.fx.GraphModule, user: torch.fx.Node, like: torch.fx.Node, value: torch.Tensor
) -> torch.fx.Node:
    """Return a node before `user` for a tensor that becomes an attribute of `graph`."""
    names = (f"_subgraph_constant{index}" for index in itertools.count())
    name = next(name for name in names if not hasattr(graph, name))
    setattr(graph, name, value)
    with graph.graph.inserting_before(user):
        node = graph.graph.create_node("get_attr", name)
    node.meta = dict(like.meta)
    return node
