"""The result of capturing a forward graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from aotexport.capture.effects.module_calls import TracedCall
from aotexport.capture.effects.record import Effects
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.capture.trace.strategies import Strategy
from aotexport.model.state import StateEntry
from aotexport_runtime.schema.program import ContainerChange
from aotexport_runtime.schema.trees import Tree


class Answer(NamedTuple):
    """The answer to a question about several inputs; see `schema.program.Question`."""

    number: int
    requires_grad: bool
    recording: bool


@dataclass(frozen=True)
class Binding:
    """The source of a graph input: state (`entry`), argument tensor `argument`, or both when they are one tensor.

    Attributes:
        argument: index of the call's tensor.
        is_differentiated: whether the model takes gradients with regard to it.
        answers: to the questions whose answers it may change.
    """

    entry: StateEntry | None = None
    argument: int | None = None
    is_differentiated: bool = False
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForwardCapture:
    """A traced forward graph.

    Attributes:
        graph: its module; placeholders in the order of `bindings`, outputs flat.
        bindings: the source of each placeholder.
        inputs: fakes per placeholder, untouched by the trace.
        constants: state entries of tensors that the code closes over, not known before.
        output_tree: structure of the returned value.
        rebinds: state entries that the call replaces, with the index of the output that replaces them.
        fakes: the fake world; its shape environment collects guards.
        function: the traced function on flat inputs in the order of `bindings`, for a direct joint capture.
        any_order: paths of dicts of the call whose keys may come in any order.
    """

    graph: torch.fx.GraphModule
    bindings: list[Binding]
    inputs: list[torch.Tensor]
    constants: list[StateEntry]
    output_tree: Tree
    rebinds: list[tuple[StateEntry, int]]
    container_changes: list[ContainerChange]
    effects: Effects
    fakes: FakeInputs
    function: Any
    strategy: Strategy
    calls: list[TracedCall]
    any_order: frozenset[str]
