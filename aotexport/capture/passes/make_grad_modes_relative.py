"""Let the ends of the model's grad-mode regions restore the mode that the call began in."""

from __future__ import annotations

from aotexport.capture.effects.grad_mode import make_relative
from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft


@graph_pass(guarantees=[Fact.GRAD_MODES_RELATIVE])
def make_grad_modes_relative(draft: Draft) -> Draft:
    """Let every marked switch restore the caller's mode, see `grad_mode`."""
    make_relative(draft.graph.graph)
    return draft
