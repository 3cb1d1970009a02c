"""Custom operators that write to their arguments, in functional graphs: a subgraph copies, calls and returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.torch_internals.subgraphs import functionalised_call, trace_function


def call_subgraph(subgraph: torch.fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
    """Run a subgraph on its operands: the target of the nodes."""
    return list(torch.fx.Interpreter(subgraph).run(*operands))


def nest_mutating_call(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Wrap a call of such an operator in a subgraph; AOTAutograd leaves it to its own compiler.

    A mutation that is no result of a node would be lost, or happen too late, when a graph is cut or reordered. The
    subgraph keeps it together with the copies that it writes to.
    """
    function, operands = functionalised_call(module, node)
    name = f"mutating_{sum(name.startswith('mutating_') for name, _ in module.named_children())}"
    module.add_submodule(name, trace_function(function, [operand.meta["val"] for operand in operands]))
    with module.graph.inserting_before(node):
        call = module.graph.call_function(call_subgraph, (module.graph.get_attr(name), operands))
    call.meta = node.meta
    node.replace_all_uses_with(call)
    attributes = [each for each in node.all_input_nodes if each.op == "get_attr"]
    module.graph.erase_node(node)
    # Keep all other nodes: operators without a used result draw random numbers, or check values.
    for attribute in attributes:
        if not attribute.users:
            module.graph.erase_node(attribute)
