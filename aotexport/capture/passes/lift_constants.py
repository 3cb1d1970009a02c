"""Turn tensors that the code closes over into inputs, held by the state."""

from __future__ import annotations

from dataclasses import replace

import torch

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.subgraphs import new_placeholder
from aotexport.capture.trace.forward_capture import Binding
from aotexport.errors import ExportFailed
from aotexport.model.state import State
from aotexport.torch_internals.calls import FakeTensor


@graph_pass(requires=[Fact.SUBGRAPHS_CLOSED], guarantees=[Fact.TENSORS_ARE_INPUTS])
def lift_constants(draft: Draft) -> Draft:
    """Turn tensors that the graph closes over into placeholders, one per tensor.

    Raises:
        ExportFailed: a tensor was made where the trace did not look.
    """
    module, state = draft.graph, State(list(draft.state))
    bindings, inputs = list(draft.bindings), list(draft.inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    by_tensor = {id(b.entry.tensor): node for b, node in zip(bindings, placeholders, strict=True) if b.entry}
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, FakeTensor):
            raise ExportFailed("the model's own backward pass uses a tensor whose making the trace does not show")
        if id(tensor) not in by_tensor:
            name = f"constant_{len(bindings) - len(placeholders)}"
            by_tensor[id(tensor)] = new_placeholder(module, name, node.meta.get("val"))
            bindings.append(Binding(entry=state.add_constant(tensor)))
            inputs.append(draft.fakes.fake(tensor))
        node.replace_all_uses_with(by_tensor[id(tensor)])
        module.graph.erase_node(node)
    return replace(draft, bindings=tuple(bindings), inputs=tuple(inputs), state=tuple(state.entries))
