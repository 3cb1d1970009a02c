"""What the trace assumed of numbers that only the data know becomes checks."""

from __future__ import annotations

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.torch_internals.checks import insert_data_dependent_checks


@graph_pass(guarantees=[Fact.NUMBERS_CHECKED])
def insert_data_checks(draft: Draft) -> Draft:
    """Write what the trace assumed of numbers that only the data know into the graph."""
    environment = draft.fakes.mode.shape_env
    assert environment is not None
    insert_data_dependent_checks(draft.graph, environment)
    return draft
