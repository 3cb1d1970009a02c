"""Refuse state that was computed with gradients before the call, in programs with gradients."""

from __future__ import annotations

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.errors import ExportFailed


@graph_pass(requires=[Fact.STATE_USED], only_grad=True)
def refuse_computed_state(draft: Draft) -> Draft:
    """Refuse state computed before the call, through which eager's gradients flow on to its sources.

    Raises:
        ExportFailed: names the tensor.
    """
    for binding in draft.bindings:
        entry = binding.entry
        if entry is not None and binding.argument is None and entry.tensor.grad_fn is not None:
            raise ExportFailed(
                f"`{entry.names[0]}` was computed from other tensors before the call ({entry.tensor.grad_fn.name()}), "
                "and gradients would flow on to those. Compute it in the call, or detach it"
            )
    return draft
