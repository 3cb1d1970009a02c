"""The passes that turn a traced graph into a forward graph, in order."""

from __future__ import annotations

from aotexport.capture.passes.contract import Draft, ordered
from aotexport.capture.passes.dump import dump_draft
from aotexport.capture.passes.refusals import (
    refuse_computed_state,
    refuse_history_by_views,
    refuse_hooks_on_state,
    refuse_nested_draws,
    refuse_resized_memory,
)
from aotexport.capture.passes.rewrites import (
    drop_unused_state,
    eliminate_dead_code,
    fix_gradients_of_loops,
    insert_data_checks,
    lift_constants,
    lift_subgraph_constants,
    make_grad_modes_relative,
)

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
    """Return a traced draft after all passes of its program, whose graph can run, or refuse it."""
    dump_draft(0, "traced", draft)
    for number, each in enumerate(PASSES, 1):
        if draft.grad or not each.only_grad:
            draft = each.run(draft)
            dump_draft(number, each.name, draft)
    draft.graph.recompile()
    return draft
