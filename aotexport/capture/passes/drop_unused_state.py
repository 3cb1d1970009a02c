"""Remove state that the graph does not use from its inputs."""

from __future__ import annotations

from dataclasses import replace

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS, Fact.CODE_USED], guarantees=[Fact.STATE_USED])
def drop_unused_state(draft: Draft) -> Draft:
    """Erase placeholders without users, arguments excepted."""
    used: list[int] = []
    for index, node in enumerate(draft.graph.graph.find_nodes(op="placeholder")):
        if draft.bindings[index].argument is None and not node.users:
            draft.graph.graph.erase_node(node)
        else:
            used.append(index)
    return replace(
        draft,
        bindings=tuple(draft.bindings[index] for index in used),
        inputs=tuple(draft.inputs[index] for index in used),
    )
