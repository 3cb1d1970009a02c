"""The passes that turn a traced graph into a forward graph, in order."""

from __future__ import annotations

from aotexport.capture.passes.contract import ordered
from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.drop_unused_state import drop_unused_state
from aotexport.capture.passes.dump import dump_draft
from aotexport.capture.passes.eliminate_dead_code import eliminate_dead_code
from aotexport.capture.passes.fix_gradients_of_loops import fix_gradients_of_loops
from aotexport.capture.passes.insert_data_checks import insert_data_checks
from aotexport.capture.passes.lift_constants import lift_constants
from aotexport.capture.passes.lift_subgraph_constants import lift_subgraph_constants
from aotexport.capture.passes.make_grad_modes_relative import make_grad_modes_relative
from aotexport.capture.passes.refuse_computed_state import refuse_computed_state
from aotexport.capture.passes.refuse_history_by_views import refuse_history_by_views
from aotexport.capture.passes.refuse_hooks_on_state import refuse_hooks_on_state
from aotexport.capture.passes.refuse_nested_draws import refuse_nested_draws
from aotexport.capture.passes.refuse_resized_memory import refuse_resized_memory

PASSES = ordered(
    lift_subgraph_constants,
    lift_constants,
    refuse_hooks_on_state,
    refuse_resized_memory,
    make_grad_modes_relative,
    insert_data_checks,
    eliminate_dead_code,
    drop_unused_state,
    refuse_computed_state,
    refuse_history_by_views,
    refuse_nested_draws,
    fix_gradients_of_loops,
)


def run_passes(draft: Draft) -> Draft:
    """Return a traced draft after all passes of its program; its graph can run.

    Raises:
        ExportFailed: the graph has something that a bundle cannot hold.
    """
    dump_draft(0, "traced", draft)
    for number, each in enumerate(PASSES, 1):
        if draft.grad or not each.only_grad:
            draft = each.run(draft)
            dump_draft(number, each.name, draft)
    draft.graph.recompile()
    return draft
