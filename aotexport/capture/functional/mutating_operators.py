"""Custom operators that write to their arguments, in functional graphs: a subgraph that copies, calls and returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.torch_internals.names import FakeTensorMode
from aotexport.torch_internals.subgraphs import functionalised_calls, trace_function


def call_subgraph(subgraph: torch.fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
    """Run a subgraph on its operands: the target of the nodes."""
    return list(torch.fx.Interpreter(subgraph).run(*operands))


def nest_mutating_calls(module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Give every call of such an operator a subgraph; AOTAutograd leaves operators that only its compiler takes apart.

    A mutation that no result of a node shows would be lost, or come too late, where a graph is cut or reordered. A
    subgraph keeps it with the copies that it writes to.

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
    # Nothing else is dead: operators without a used result draw, or check values.
    for attribute in module.graph.find_nodes(op="get_attr"):
        if not attribute.users:
            module.graph.erase_node(attribute)
    module.recompile()
