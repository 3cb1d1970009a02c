"""A forward graph on its way through the passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aotexport.capture.effects.record import Read
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.capture.trace.forward_capture import Binding
from aotexport.model.state import StateEntry


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A traced graph with its inputs and state; every pass returns a new draft.

    A pass owns the draft that it takes: it may change the graph in place, and the old draft is not used again.

    Attributes:
        graph: its module; placeholders in the order of `bindings`, outputs flat. Compiled anew after the last pass.
        bindings: the input that each placeholder stands for.
        inputs: fakes per placeholder, untouched by the trace.
        state: tensors of the module, then constants that passes found.
        fakes: the fake world; its shape environment knows the assumptions of the trace.
        grad: whether the program is for calls that record gradients.
        reads: facts of a call that the program depends on; see `Program.fixed`.
        recorded: entries of the state to which the call writes values that require grad.
    """

    graph: torch.fx.GraphModule
    bindings: tuple[Binding, ...]
    inputs: tuple[Any, ...]
    state: tuple[StateEntry, ...]
    fakes: FakeInputs
    grad: bool
    reads: frozenset[Read] = frozenset()
    recorded: tuple[StateEntry, ...] = ()
