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
    """Turn tensors that the graph closes over into placeholders, one per tensor; one for equal ones that it copies.

    Raises:
        ExportFailed: a tensor was made where the trace did not look.
    """
    module, state = draft.graph, State(list(draft.state))
    bindings, inputs = list(draft.bindings), list(draft.inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    by_entry = {id(b.entry): node for b, node in zip(bindings, placeholders, strict=True) if b.entry}
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, FakeTensor):
            raise ExportFailed("the model's own backward pass uses a tensor whose making the trace does not show")
        is_copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        entry = state.add_constant(tensor, is_copied=is_copied)
        if id(entry) not in by_entry:
            name = f"constant_{len(bindings) - len(placeholders)}"
            by_entry[id(entry)] = new_placeholder(module, name, node.meta.get("val"))
            bindings.append(Binding(entry=entry))
            inputs.append(draft.fakes.fake(tensor))
        node.replace_all_uses_with(by_entry[id(entry)])
        module.graph.erase_node(node)
    return replace(draft, bindings=tuple(bindings), inputs=tuple(inputs), state=tuple(state.entries))
