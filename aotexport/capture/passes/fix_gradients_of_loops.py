"""Fix the facts of arguments that torch's backward of a `while_loop` depends on."""

from __future__ import annotations

from dataclasses import replace

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.subgraph_gradients import differentiable_operators, draws, operator_name
from aotexport.capture.passes.subgraphs import subgraphs_of


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS, Fact.CODE_USED], only_grad=True)
def fix_gradients_of_loops(draft: Draft) -> Draft:
    """Fix the facts beside values that gradients through a `while_loop` depend on in torch; see `Program.fixed`.

    Values that begin without requiring grad carry none from step to step (`WhileLoopAutogradOp`). The backward of a
    loop that draws random numbers draws them for contiguous values.
    """
    loops = [n for n in differentiable_operators(draft.graph, draft.inputs) if operator_name(n) == "while_loop"]
    reads = draft.reads
    if loops:
        reads |= {"requires_grad"}
    if any(draws(subgraph) for loop in loops for subgraph in subgraphs_of(draft.graph, loop)):
        reads |= {"layout"}
    return replace(draft, reads=reads)
