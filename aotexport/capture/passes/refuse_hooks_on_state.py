"""Refuse hooks on the model's own tensors: every call would add another."""

from __future__ import annotations

from aotexport.capture.effects.hooks import apply_hook
from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.errors import ExportFailed


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS])
def refuse_hooks_on_state(draft: Draft) -> Draft:
    """Refuse hooks on state.

    Raises:
        ExportFailed: names the tensor.
    """
    graph = draft.graph.graph
    entries = {node: b.entry for node, b in zip(graph.find_nodes(op="placeholder"), draft.bindings, strict=True)}
    for node in graph.find_nodes(op="call_function", target=apply_hook):
        entry = entries.get(node.args[1])
        if entry is not None:
            raise ExportFailed(
                f"the model registers a hook on its own `{entry.names[0]}` in the call, and every call would add one. "
                "Register it on the loaded module's parameter"
            )
    return draft
