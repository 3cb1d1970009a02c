"""Branches and loops of a loaded bundle's graph, recorded as such in a trace of it: a call goes one way only."""

from __future__ import annotations

from typing import Any

import torch

from aotexport.process.patches import Patch
from aotexport_runtime.execution import higher_order
from aotexport_runtime.execution.higher_order import Step


def patches() -> list[Patch]:
    """Return patches that record branches, loops, scans and maps with their subgraphs."""
    branch_of, loop_of = higher_order.branch, higher_order.loop

    def branch(predicate: Any, yes: Step, no: Step, operands: list[Any]) -> tuple[Any, ...]:
        if not isinstance(predicate, torch.Tensor | torch.SymBool):
            return branch_of(predicate, yes, no, operands)
        return tuple(torch.ops.higher_order.cond(predicate, yes, no, tuple(operands)))

    def loop(condition: Step, step: Step, carried: list[Any], additional: list[Any]) -> tuple[Any, ...]:
        if not all(isinstance(value, torch.Tensor) for value in carried):
            return loop_of(condition, step, carried, additional)

        def goes_on(*values: Any) -> Any:
            return condition(*values)[0]

        return tuple(torch.ops.higher_order.while_loop(goes_on, step, tuple(carried), tuple(additional)))

    def scan(combine: Step, initial: list[Any], xs: list[Any], additional: list[Any]) -> tuple[Any, ...]:
        return tuple(torch.ops.higher_order.scan(combine, initial, xs, tuple(additional)))

    def map_rows(step: Step, xs: list[Any], additional: list[Any]) -> tuple[Any, ...]:
        return tuple(torch.ops.higher_order.map_impl(step, tuple(xs), tuple(additional)))

    return [
        Patch(higher_order, function.__name__, function, "Record branches and loops of a loaded bundle's graph")
        for function in (branch, loop, scan, map_rows)
    ]
