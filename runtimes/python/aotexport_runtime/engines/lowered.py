"""Lowered programs of any target: functions that replace a functional graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.engine import Native
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph
from aotexport_runtime.rewrite.names import names_in
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.values import sizes

ALIGNMENT = 16
"""Alignment that kernels assume of every tensor's address, in bytes."""


@dataclass(frozen=True)
class Lowered(Native):
    """A lowered program.

    Attributes:
        forward: takes the program's inputs; returns the functional graph's results before gradients, then the saved
            tensors; none of them a view.
        backward: takes the saved tensors, then all tangents; returns a gradient, or None, per input. None: it is an
            inference program.
        saved: how many tensors the forward saves.
        guards: truths over the symbols that it assumes.
        trial: says for inputs and symbols of a call whether the results are right; None: nobody compares them.
    """

    target: str
    forward: Function
    backward: Function | None
    saved: int
    guards: tuple[SizeExpression, ...] = ()
    trial: Callable[[Sequence[Any], Mapping[str, int]], bool] | None = None

    def why_not(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str | None:
        unmet = [guard for guard in self.guards if not sizes.evaluate(guard, symbols)]
        if unmet:
            return f"kernels are for {' and '.join(sizes.describe(guard).strip('()') for guard in unmet)}"
        if self.trial is None or self.trial(inputs, symbols):
            return None
        return "kernels failed the comparison on the first call, of which the log tells"

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        return self.forward

    def backward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        assert self.backward is not None
        return self.backward


class Lease:
    """Lives as long as the saved tensors of a forward may be read."""


class LeasedResults(tuple[Any, ...]):
    """Results of a forward whose saved tensors lie in memory that later calls overwrite, until `lease` is gone."""

    lease: Lease

    def __new__(cls, results: Iterable[Any], lease: Lease) -> LeasedResults:
        """Return `results` with a lease."""
        self = super().__new__(cls, results)
        self.lease = lease
        return self


def lowered_graphs(
    bundle: Bundle, target: str, program: Program, environment: Environment, kernels: Mapping[str, Callable[..., None]]
) -> Lowered:
    """Return a program lowered to graphs of operator calls and launches, by a launcher per kernel name."""
    record = bundle.lowered(target, program.name)
    environment = dataclasses.replace(environment, kernels=kernels, unguarded=True)

    def compiled(backward: bool) -> Function:
        graph = bundle.lowered_graph(target, program.name, backward=backward)
        names = [graph_input.name for graph_input in graph.inputs]
        label = f"{program.name} {'backward' if backward else 'forward'} ({target})"
        returned = set(names_in(graph.outputs))
        detached = () if backward else returned
        function = compile_graph(graph, graph.nodes, names, graph.outputs, environment, label=label, detached=detached)
        return lambda args, symbols: function([_aligned(arg) for arg in args], symbols)

    return Lowered(
        target=target,
        forward=compiled(False),
        backward=None if record.backward is None else compiled(True),
        saved=record.saved,
        guards=record.guards,
    )


def _aligned(value: Any) -> Any:
    """Return a tensor, or a copy of the same layout where it is not aligned as kernels assume."""
    if not isinstance(value, torch.Tensor) or value.data_ptr() % ALIGNMENT == 0:
        return value
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value.detach())
