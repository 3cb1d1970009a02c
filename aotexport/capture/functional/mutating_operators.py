"""Custom operators that write to their arguments, in functional graphs: a subgraph copies, calls and returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.torch_internals.calls import FakeTensorMode
from aotexport.torch_internals.subgraphs import functionalised_calls, trace_function


def call_subgraph(subgraph: torch.fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
    """Run a subgraph on its operands: the target of the nodes."""
    return list(torch.fx.Interpreter(subgraph).run(*operands))


def nest_mutating_calls(module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Wrap every call of such an operator in a subgraph; AOTAutograd leaves them to its own compiler.

    A mutation that is no result of a node would be lost, or happen too late, when a graph is cut or reordered. The
    subgraph keeps it together with the copies that it writes to.

    Args:
        module: a functional graph; changed in place.
        fake_mode: of its values.
    """
    for number, (node, function, operands) in enumerate(functionalised_calls(module)):
        values = [operand.meta["val"] for operand in operands]
        name = f"mutating_{number}"
        module.add_submodule(name, trace_function(function, values, fake_mode))
        with module.graph.inserting_before(node):
            subgraph = module.graph.get_attr(name)
            call = module.graph.call_function(call_subgraph, (subgraph, operands))
        call.meta = node.meta
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    # Keep all other nodes: operators without a used result draw random numbers, or check values.
    for attribute in module.graph.find_nodes(op="get_attr"):
        if not attribute.users:
            module.graph.erase_node(attribute)
    module.recompile()
