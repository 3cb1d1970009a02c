"""Refuse gradients from one tensor of the state to another that is a view of the same memory."""

from __future__ import annotations

import itertools

import torch

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.errors import ExportFailed


@graph_pass(requires=[Fact.STATE_USED], only_grad=True)
def refuse_history_by_views(draft: Draft) -> Draft:
    """Refuse to write values that require grad to a tensor of the state if another used one shares its memory.

    Raises:
        ExportFailed: names both tensors.
    """
    used = [binding.entry for binding in draft.bindings if binding.entry is not None]
    for entry, other in itertools.product(draft.recorded, used):
        if other is not entry and _base(other.tensor) is _base(entry.tensor):
            raise ExportFailed(
                f"the call writes values that require grad to `{entry.names[0]}`, and uses `{other.names[0]}`, which "
                "is a view of the same memory: a bundle keeps no gradients between the two. Keep one of them as a "
                "buffer, and take the other from it in the call"
            )
    return draft


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
