"""A forward graph on its way through the passes, and a pass: the facts that it requires and guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
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
        state: tensors of the module, then constants that passes found.
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


class Fact(StrEnum):
    """A property of drafts that one pass guarantees and later ones rely on."""

    SUBGRAPHS_CLOSED = "subgraphs of operators close over no tensors"
    TENSORS_ARE_INPUTS = "every tensor that the graph uses is an input"
    GRAD_MODES_RELATIVE = "grad-mode regions end in the mode that the call began in"
    NUMBERS_CHECKED = "the graph checks the assumptions of its trace about data-dependent numbers"
    CODE_USED = "every node is used, or has an effect"
    STATE_USED = "every input that is no argument is used"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A step from a traced graph to a forward graph.

    Attributes:
        run: returns the renewed draft, or raises `ExportFailed` for a graph that a bundle cannot hold.
        requires: facts that earlier passes must have guaranteed.
        guarantees: facts that hold from then on.
        only_grad: whether it runs only for programs that record gradients.
    """

    name: str
    run: Callable[[Draft], Draft]
    requires: frozenset[Fact]
    guarantees: frozenset[Fact]
    only_grad: bool


def graph_pass(
    *, requires: Iterable[Fact] = (), guarantees: Iterable[Fact] = (), only_grad: bool = False
) -> Callable[[Callable[[Draft], Draft]], Pass]:
    """Make a pass of a function from draft to draft; see `Pass` for the arguments."""

    def decorate(run: Callable[[Draft], Draft]) -> Pass:
        return Pass(
            name=run.__name__,
            run=run,
            requires=frozenset(requires),
            guarantees=frozenset(guarantees),
            only_grad=only_grad,
        )

    return decorate


def ordered(*passes: Pass) -> tuple[Pass, ...]:
    """Return the passes in the order given.

    Raises:
        ValueError: a pass requires a fact that no earlier pass guarantees for all of its programs.
    """
    for index, each in enumerate(passes):
        before = [earlier.guarantees for earlier in passes[:index] if each.only_grad or not earlier.only_grad]
        for fact in sorted(each.requires.difference(*before)):
            raise ValueError(f"pass `{each.name}` requires that {fact}, which no pass before it guarantees")
    return passes
