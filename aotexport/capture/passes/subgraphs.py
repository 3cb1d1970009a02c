"""Operators with bodies in a forward graph: what they run, and the tensors that their bodies close over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from aotexport.torch_internals.names import FakeTensor, HigherOrderOperator


def is_operator(node: torch.fx.Node) -> bool:
    """Return whether a node calls an operator that takes functions."""
    return isinstance(node.target, HigherOrderOperator)


def bodies(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.GraphModule]:
    """Yield the graphs that a node of `graph` runs."""
    for operand in node.all_input_nodes:
        body = getattr(graph, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            yield body


def lift_constants_of_bodies(graph: torch.fx.GraphModule) -> None:
    """Make tensors that bodies close over, as `torch.tensor(2.0)` in one, operands; `graph` closes over them then.

    The operators are those whose last argument holds the operands that their bodies take last: `cond`, `while_loop`,
    `scan`, `map` (torch 2.13, `torch/_higher_order_ops/`).
    """
    for node in list(graph.graph.nodes):
        run = list(bodies(graph, node)) if is_operator(node) else []
        if not run or not isinstance(node.args[-1], list | tuple):
            continue
        operands = list(node.args[-1])
        for body in run:
            lift_constants_of_bodies(body)
        for owner, constant in [(body, constant) for body in run for constant in _constants(body)]:
            operands.append(_attribute(graph, node, constant, getattr(owner, str(constant.target))))
            name, value = f"constant_{len(operands)}", constant.meta["val"]
            placeholders = {other: new_placeholder(other, name, value) for other in run}
            constant.replace_all_uses_with(placeholders[owner])
            owner.graph.erase_node(constant)
        node.update_arg(len(node.args) - 1, tuple(operands))
        for body in run:
            body.recompile()


def _constants(body: torch.fx.GraphModule) -> list[torch.fx.Node]:
    held = [(node, getattr(body, str(node.target), None)) for node in body.graph.find_nodes(op="get_attr")]
    return [node for node, value in held if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)]


def _attribute(
    graph: torch.fx.GraphModule, user: torch.fx.Node, like: torch.fx.Node, value: torch.Tensor
) -> torch.fx.Node:
    """Return a node before `user` for a tensor, which becomes an attribute of `graph`."""
    names = (f"_constant_of_body{index}" for index in itertools.count())
    name = next(name for name in names if not hasattr(graph, name))
    setattr(graph, name, value)
    with graph.graph.inserting_before(user):
        node = graph.graph.get_attr(name)
    node.meta = dict(like.meta)
    return node


def new_placeholder(graph: torch.fx.GraphModule, name: str, value: Any) -> torch.fx.Node:
    """Return a placeholder after those that a graph has; `value` is what it stands for."""
    last = next(reversed(graph.graph.find_nodes(op="placeholder")), None)
    with graph.graph.inserting_after(last) if last is not None else graph.graph.inserting_before():
        placeholder = graph.graph.placeholder(name)
    placeholder.meta["val"] = value
    return placeholder
