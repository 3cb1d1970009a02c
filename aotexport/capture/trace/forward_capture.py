"""The result of capturing a forward graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from aotexport.capture.effects.record import Effects
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.capture.trace.flat_call import FlatCall
from aotexport.errors import ExportFailed
from aotexport.model.state import StateEntry
from aotexport.torch_internals.names import SET_GRAD_ENABLED


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
        fakes: the fake world; its shape environment collects guards.
        function: the traced function on flat inputs in the order of `bindings`, for a direct joint capture.
        any_order: paths of dicts of the call whose keys may come in any order.
        custom_operators: names of those in the graph that the user did not ask to keep.
        launched: names of the Triton kernels that the model launches itself.
    """

    graph: torch.fx.GraphModule
    bindings: Sequence[Binding]
    inputs: Sequence[Any]
    constants: Sequence[StateEntry]
    effects: Effects
    fakes: FakeInputs
    function: FlatCall
    any_order: frozenset[str]
    custom_operators: frozenset[str]
    launched: tuple[str, ...]


def check_nothing_lost(direct: ForwardCapture, other: ForwardCapture) -> None:
    """Refuse a capture that lacks an effect of the direct one, which holds for fewer sizes and is not used.

    Raises:
        ExportFailed: it lacks one.
    """
    for effect in set(_effects(direct)) - set(_effects(other)):
        raise ExportFailed(f"{effect} would be lost")


def _effects(capture: ForwardCapture) -> Iterator[str]:
    for entry, _ in capture.function.rebinds:
        yield f"the new tensor for `{entry.names[0]}`"
    for change in capture.function.container_changes:
        yield f"the change of `{change.path}`"
    switches = list(capture.graph.graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED))
    if switches and switches[-1].args[0] is False:
        yield "the grad mode that the call leaves"
