"""Remove state that the graph does not use from its inputs."""

from __future__ import annotations

from dataclasses import replace

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS, Fact.CODE_USED], guarantees=[Fact.STATE_USED])
def drop_unused_state(draft: Draft) -> Draft:
    """Erase placeholders without users, except arguments, and state of which the code asks whether it requires grad."""
    used: list[int] = []
    for index, node in enumerate(draft.graph.graph.find_nodes(op="placeholder")):
        binding = draft.bindings[index]
        if binding.argument is None and not binding.answers and not node.users:
            draft.graph.graph.erase_node(node)
        else:
            used.append(index)
    return replace(
        draft,
        bindings=tuple(draft.bindings[index] for index in used),
        inputs=tuple(draft.inputs[index] for index in used),
    )
