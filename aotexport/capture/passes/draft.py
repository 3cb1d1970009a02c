"""A forward graph on its way through the passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotexport.capture.effects.questions import QUESTIONS, Question, own_code
from aotexport.capture.effects.record import Read
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.capture.trace.flat_call import FlatCall
from aotexport.capture.trace.forward_capture import Answer, Binding
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


def draft_of(flat: FlatCall, reads: frozenset[Read]) -> Draft:
    """Return the draft of a traced graph, for the passes."""
    arguments = {entry: argument for argument, entry in flat.shared.items()}
    bindings = [
        *(Binding(entry=entry, argument=arguments.get(index)) for index, entry in enumerate(flat.state.entries)),
        *(Binding(argument=argument) for argument in flat.own),
    ]
    answers = _answers(flat)
    bindings = [
        replace(b, is_differentiated=index in flat.differentiated, answers=tuple(answers.get(index, ())))
        for index, b in enumerate(bindings)
    ]
    return Draft(
        graph=flat.graph,
        bindings=tuple(bindings),
        inputs=tuple(flat.inputs()),
        state=tuple(flat.state.entries),
        fakes=flat.fakes,
        grad=flat.grad,
        reads=reads,
        recorded=tuple(flat.recorded),
    )


def _answers(flat: FlatCall) -> dict[int, list[Answer]]:
    """Return the answers that each input may change, by its index."""
    required = {
        index: fake.requires_grad
        for index, fake in enumerate(flat.inputs())
        if isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex())
    }
    asked: list[tuple[Iterable[int], bool, bool]] = []
    questions = [*flat.effects.questions.asked]
    if not flat.strategy.runs_own_code:
        # Code that a strategy runs is not watched.
        codes = own_code(flat.call.callable, flat.call.module)
        questions += [Question(None, False, False) for code in codes if not QUESTIONS.isdisjoint(code.co_names)][:1]
    for question in questions:
        if question.sources is not None:
            asked.append((question.sources, question.requires_grad, question.recording))
        else:
            asked += [([index], requires_grad, question.recording) for index, requires_grad in required.items()]
    found: dict[int, list[Answer]] = {}
    for number, (sources, requires_grad, recording) in enumerate(asked):
        for index in sources:
            if index in required:
                found.setdefault(index, []).append(Answer(number, requires_grad, recording))
    return found
