"""The example call as a function of flat tensors, and its trace: operators on fake tensors become a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotexport.capture.effects.arithmetic import symbolic_arithmetic
from aotexport.capture.effects.autograd_functions import refuse_bound
from aotexport.capture.effects.checkpoints import Checkpoints
from aotexport.capture.effects.grad_mode import insert_regions, marked_regions
from aotexport.capture.effects.module_calls import TracedCalls
from aotexport.capture.effects.patched import patches
from aotexport.capture.effects.questions import Questions, current_questions
from aotexport.capture.effects.record import Effects, Read
from aotexport.capture.effects.recurrence import whole_recurrence
from aotexport.capture.effects.watch import Watch, current_watch
from aotexport.capture.trace.example_values import ExampleValues
from aotexport.capture.trace.fake_kernels import FAKE_KERNELS
from aotexport.capture.trace.fakes import FakeInputs, is_shaped_alike
from aotexport.capture.trace.key_order import KeyOrder
from aotexport.capture.trace.outside_tensors import OutsideTensors
from aotexport.capture.trace.python_operators import traced_operators
from aotexport.capture.trace.reading_values import READING_VALUES
from aotexport.capture.trace.strategies import Strategy
from aotexport.errors import ExportFailed
from aotexport.model.array_proxies import is_proxy, tensor_within
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import is_bug
from aotexport.model.source_lines import is_user_frame
from aotexport.model.state import State, StateEntry, swapped
from aotexport.model.structure import tree_of
from aotexport.process.patches import patched
from aotexport.state.arguments import argument_tables, container_changes
from aotexport.state.tensors import reached_tensors
from aotexport.state.world import world_kept
from aotexport.torch_internals.applications import applied_functions
from aotexport.torch_internals.calls import FakeTensor
from aotexport.torch_internals.patches import average_in_tensors, fake_kernels, masks_unread
from aotexport.torch_internals.tracing import trace_forward
from aotexport.torch_internals.transforms import has_transforms, raised_in_transform
from aotexport_runtime.schema.program import ContainerChange
from aotexport_runtime.schema.trees import Tree


@dataclass
class FlatCall:
    """The callable on flat tensors: state entries first, then the arguments that are no state.

    A call returns flat tensors, and records the callable's other effects.

    Attributes:
        target: the callable, as the strategy prepares it.
        shared: entry of the state that an argument is, by the argument's index.
        outside: tensors that the code may reach other than by arguments and modules' tables.
        key_order: another order of the keys of dicts in the call; None: the example's.
        output_tree: structure of the returned value; its leaves are indices of the flat tensors.
        differentiated: indices of tensors with regard to which the code takes gradients.
        recorded: entries to which the call writes values that require grad.
        reshaped: entries that the call leaves with another shape, dtype or layout, and what it leaves.
        above_autograd: whether the trace sees operators before autograd does.
        asks: whether the code asked for the value of a size (`range(size)`).
        added_in_text: added to sizes that the code makes text of; None: such text holds calls to the example's.
        makes_text: whether it made such text.
        calls: its calls of submodules.
        graph: the module of the trace; placeholders in the order of `inputs`, outputs flat.
    """

    call: ExampleCall
    strategy: Strategy
    target: Any
    state: State
    shared: dict[int, int]
    values: ExampleValues
    grad: bool
    fakes: FakeInputs
    outside: Sequence[torch.Tensor]
    key_order: KeyOrder | None = None
    output_tree: Tree = field(init=False)
    rebinds: list[tuple[StateEntry, int]] = field(default_factory=list)
    container_changes: list[ContainerChange] = field(default_factory=list)
    effects: Effects = field(default_factory=Effects)
    differentiated: set[int] = field(default_factory=set)
    recorded: list[StateEntry] = field(default_factory=list)
    reshaped: list[tuple[StateEntry, torch.Tensor]] = field(default_factory=list)
    above_autograd: bool = True
    asks: bool = False
    added_in_text: int | None = 0
    makes_text: bool = False
    calls: TracedCalls = field(default_factory=TracedCalls)
    graph: torch.fx.GraphModule = field(init=False)

    @property
    def own(self) -> list[int]:
        """Indices of the arguments that are no state."""
        return [index for index in range(len(self.call.tensors)) if index not in self.shared]

    def inputs(self) -> list[Any]:
        """Return its fake inputs, in order."""
        return [*self.fakes.state, *[self.fakes.arguments[index] for index in self.own]]

    def _ask(self) -> None:
        self.asks = True

    def _write(self) -> int | None:
        self.makes_text = True
        return self.added_in_text

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        self.values.begin()
        count = len(self.state.entries)
        own = iter(tensors[count:])
        indices_of_arguments = range(len(self.call.tensors))
        arguments = [tensors[self.shared[i]] if i in self.shared else next(own) for i in indices_of_arguments]
        args, kwargs = self.call.rebuild(arguments)
        if self.key_order is not None:
            kwargs = self.key_order.put(self.call, args, kwargs)
        known = [entry.tensor for entry in self.state.entries]
        outside = OutsideTensors(self.fakes, self.outside, zip(known, tensors, strict=False))
        outputs: list[Any] = []
        indices: dict[int, int] = {}

        def leaf_index(value: Any, path: str) -> int | None:
            if type(value) is int:
                return None
            value = tensor_within(value) if is_proxy(value) else outside.proxied(value)
            if id(value) not in indices:
                indices[id(value)] = len(outputs)
                outputs.append(value)
            return indices[id(value)]

        with (
            symbolic_arithmetic(self.target, self.call.module, self._ask, self._write),
            self._observed() as self.effects,
            swapped(self.state, list(tensors[:count]), self.target) as replaced,
            outside,
        ):
            before = argument_tables(self.call, args, kwargs)
            result = self.target(*args, **kwargs)
        ids = {id(tensor) for tensor in self.effects.differentiated}
        self.differentiated = {index for index, tensor in enumerate(tensors) if id(tensor) in ids}
        self.recorded = [
            entry
            for entry, tensor in zip(self.state.entries, tensors[:count], strict=True)
            if tensor.requires_grad and not entry.tensor.requires_grad
        ]
        self.output_tree = tree_of(result, "output", leaf_index, role="output")
        self.container_changes = container_changes(self.call, before, leaf_index)
        if any(isinstance(value, torch.Tensor) and value.retains_grad for value in outputs):
            raise ExportFailed(
                "the model calls `retain_grad` on what it returns, which a bundle cannot hold. Call it on what the "
                "loaded module returns"
            )
        self.rebinds = [(entry, _required(leaf_index(new, ""), entry)) for entry, new in replaced]
        left = {id(entry): new for entry, new in replaced}
        pairs = zip(self.state.entries, self.fakes.state, tensors, strict=False)
        after = [(entry, before, left.get(id(entry), tensor)) for entry, before, tensor in pairs]
        self.reshaped = [(entry, new) for entry, before, new in after if not is_shaped_alike(before, new)]
        return tuple(outputs)

    @contextlib.contextmanager
    def _observed(self) -> Iterator[Effects]:
        """Watch the model run under tracing, refusing what tracing loses; its effects are complete after the block."""
        module, reads = self.call.module, set[Read]()
        effects = Effects(
            above_autograd=self.above_autograd,
            grad=self.grad,
            reads=reads,
            questions=Questions(self.grad, reads),
            checkpoints=Checkpoints(module),
        )
        tables = [vars(each) for each in module.modules()] if module is not None else []
        with (
            world_kept(self.target, module) as told,
            applied_functions(effects.applied, refuse_bound, tables),
            patched(*patches(effects), *effects.checkpoints.patches()),
            Watch(effects) as watch,
        ):
            tokens = current_questions.set(effects.questions), current_watch.set(watch)
            try:
                yield effects
            finally:
                current_questions.reset(tokens[0])
                current_watch.reset(tokens[1])
        effects.stored += told.stored
        effects.notes += told.notes


def _required(index: int | None, entry: StateEntry) -> int:
    if index is None:
        raise ExportFailed(f"the call replaces the tensor `{entry.names[0]}` by something that is no tensor")
    return index


def trace_call(
    call: ExampleCall,
    state: State,
    strategy: Strategy,
    target: Any,
    fakes: FakeInputs,
    *,
    grad: bool,
    texts_hold: bool = False,
) -> FlatCall:
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
    entries = {id(entry.tensor): index for index, entry in enumerate(state.entries)}
    shared = {index: entries[id(t)] for index, t in enumerate(call.tensors) if id(t) in entries}
    own = [tensor for index, tensor in enumerate(call.tensors) if index not in shared]
    flat = FlatCall(
        call=call,
        strategy=strategy,
        target=target,
        state=State(list(state.entries), reshaped=state.reshaped),
        shared=shared,
        values=ExampleValues([*(entry.tensor for entry in state.entries), *own]),
        grad=grad,
        fakes=fakes,
        outside=reached_tensors((call.callable, call.module)),
        added_in_text=None if texts_hold else 0,
    )
    trace_graph(flat)
    if not strategy.grad:
        flat.effects.reads.add("grad_mode")
    return flat


def trace_graph(flat: FlatCall) -> None:
    """Trace `flat`, above autograd if its effects allow that; switches of grad mode stay in the trace."""
    inputs, environment = flat.inputs(), flat.fakes.mode.shape_env
    assert environment is not None
    apart = {**READING_VALUES, **traced_operators()}
    whole = {**apart, **whole_recurrence()}

    def recorded(*tensors: Any) -> tuple[Any, ...]:
        with flat.calls.recorded(flat.call.module):
            return flat(*tensors)

    def trace(decompositions: Mapping[Any, Any] = whole, **options: Any) -> torch.fx.GraphModule:
        options |= {"keeps_frame": is_user_frame, "decompositions": decompositions}
        return trace_forward(recorded, flat.fakes.twins(inputs), flat.fakes.mode, **options)

    with (
        flat.fakes.tracing(),
        average_in_tensors(),
        fake_kernels(FAKE_KERNELS),
        torch.set_grad_enabled(flat.strategy.grad),
        masks_unread(),
        marked_regions(),
        flat.values.followed(environment) if flat.strategy.follows_values else contextlib.nullcontext(),
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
    flat.graph = graph


def _hides_tensors(graph: torch.fx.GraphModule) -> bool:
    """Return whether the model's own backward pass uses tensors computed inside of operators."""
    nodes = graph.graph.find_nodes(op="get_attr")
    return any(isinstance(getattr(graph, str(node.target), None), FakeTensor) for node in nodes)
