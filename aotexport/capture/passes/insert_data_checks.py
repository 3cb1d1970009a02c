"""Turn the trace's assumptions about data-dependent numbers into checks."""

from __future__ import annotations

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.torch_internals.checks import insert_data_dependent_checks


@graph_pass(guarantees=[Fact.NUMBERS_CHECKED])
def insert_data_checks(draft: Draft) -> Draft:
    """Insert checks of the trace's assumptions about data-dependent numbers into the graph."""
    environment = draft.fakes.mode.shape_env
    assert environment is not None
    insert_data_dependent_checks(draft.graph, environment)
    return draft
