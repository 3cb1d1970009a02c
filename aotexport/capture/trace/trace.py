"""One trace of the example call: it runs on fake tensors, and its operators become a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotexport.capture.effects.grad_mode import insert_regions, marked_regions
from aotexport.capture.effects.module_calls import TracedCall, TracedCalls
from aotexport.capture.effects.recurrence import whole_recurrence
from aotexport.capture.trace.example_values import ExampleValues
from aotexport.capture.trace.fake_kernels import FAKE_KERNELS
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.capture.trace.flat_call import FlatCall
from aotexport.capture.trace.python_operators import traced_operators
from aotexport.capture.trace.reading_values import READING_VALUES
from aotexport.capture.trace.strategies import Strategy
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import is_bug
from aotexport.model.source_lines import is_user_frame
from aotexport.model.state import State
from aotexport.state.tensors import reached_tensors
from aotexport.torch_internals.calls import FakeTensor
from aotexport.torch_internals.patches import average_in_tensors, fake_kernels, masks_unread
from aotexport.torch_internals.tracing import stamped, trace_forward
from aotexport.torch_internals.transforms import has_transforms, raised_in_transform


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced graph, with the effects of the traced call.

    Attributes:
        graph: its module; outputs flat.
        function: the call on flat inputs, in the order of the graph's placeholders, with its effects.
        inputs: fakes per placeholder, untouched by the trace.
        order: the nodes as they were made, those that were removed since among them.
    """

    graph: torch.fx.GraphModule
    function: FlatCall
    inputs: Sequence[Any]
    strategy: Strategy
    calls: list[TracedCall]
    order: list[torch.fx.Node]


def trace_call(
    call: ExampleCall,
    state: State,
    strategy: Strategy,
    target: Any,
    fakes: FakeInputs,
    *,
    grad: bool,
    texts_hold: bool = False,
) -> Trace:
    """Trace the call by a strategy.

    Args:
        call: the example call; the module is in the wanted mode.
        state: its state.
        strategy: how the call is traced.
        target: the callable, as the strategy prepared it.
        fakes: a fake world for the trace alone.
        grad: whether grad mode is on.
        texts_hold: whether text that the code makes of a size holds calls to the example's.
    """
    flat = _flat_call(call, state, target, fakes, grad=grad)
    flat.added_in_text = None if texts_hold else 0
    calls, order = TracedCalls(), list[torch.fx.Node]()
    inputs = flat.inputs()
    with stamped(order.append):
        graph = trace_graph(flat, calls, strategy)
    if not strategy.grad:
        flat.effects.reads.add("grad_mode")
    return Trace(
        graph=graph,
        function=flat,
        inputs=inputs,
        strategy=strategy,
        calls=calls.calls,
        order=order,
    )


def _flat_call(call: ExampleCall, state: State, target: Any, fakes: FakeInputs, *, grad: bool) -> FlatCall:
    entries = {id(entry.tensor): index for index, entry in enumerate(state.entries)}
    shared = {index: entries[id(t)] for index, t in enumerate(call.tensors) if id(t) in entries}
    own = [tensor for index, tensor in enumerate(call.tensors) if index not in shared]
    values = ExampleValues([*(entry.tensor for entry in state.entries), *own])
    outside = reached_tensors((call.callable, call.module))
    known = State(list(state.entries), reshaped=state.reshaped)
    return FlatCall(call, target, known, shared, values, grad, fakes, outside)


def trace_graph(flat: FlatCall, calls: TracedCalls, strategy: Strategy) -> torch.fx.GraphModule:
    """Return a trace of `flat`, above autograd if its effects allow that, and record its calls in `calls`.

    Args:
        flat: the call.
        calls: for its calls of submodules.
        strategy: says whether gradients are on while the model runs, and whether it follows the example's values.
    """
    inputs, environment = flat.inputs(), flat.fakes.mode.shape_env
    assert environment is not None
    apart = {**READING_VALUES, **traced_operators()}
    whole = {**apart, **whole_recurrence()}

    def recorded(*tensors: Any) -> tuple[Any, ...]:
        with calls.recorded(flat.call.module):
            return flat(*tensors)

    def trace(decompositions: Mapping[Any, Any] = whole, **options: Any) -> torch.fx.GraphModule:
        options |= {"keeps_frame": is_user_frame, "decompositions": decompositions}
        return trace_forward(recorded, flat.fakes.twins(inputs), flat.fakes.mode, **options)

    with (
        flat.fakes.tracing(),
        average_in_tensors(),
        fake_kernels(FAKE_KERNELS),
        torch.set_grad_enabled(strategy.grad),
        masks_unread(),
        marked_regions(),
        flat.values.followed(environment) if strategy.follows_values else contextlib.nullcontext(),
    ):
        graph = None
        try:
            graph = trace()
        except Exception as error:
            if is_bug(error) or not raised_in_transform(error):
                raise
        if graph is None or has_transforms(graph.graph):
            flat.above_autograd = False
            graph = trace(above_autograd=False)
            insert_regions(graph.graph)
        elif _hides_tensors(graph):
            graph = trace(apart, whole_composites=False)
    return graph


def _hides_tensors(graph: torch.fx.GraphModule) -> bool:
    """Return whether the model's own backward pass uses tensors computed inside of operators."""
    nodes = graph.graph.find_nodes(op="get_attr")
    return any(isinstance(getattr(graph, str(node.target), None), FakeTensor) for node in nodes)
