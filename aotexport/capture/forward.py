"""The forward graph: the program before autograd, in place mutations and all."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotexport.capture.effects.distributed import FromLocal
from aotexport.capture.effects.grad_mode import insert_regions, make_relative, marked_regions
from aotexport.capture.effects.hooks import refuse_hooks_on_state
from aotexport.capture.effects.identity import asks_identity
from aotexport.capture.effects.module_calls import TracedCalls
from aotexport.capture.effects.training_mode import mode_watched
from aotexport.capture.effects.triton_kernels import launches_traced
from aotexport.capture.passes.agreement import check_nothing_lost
from aotexport.capture.passes.subgraph_gradients import asked_of_arguments, refuse_nested_bodies_that_draw
from aotexport.capture.passes.subgraphs import lift_constants_of_bodies, new_placeholder
from aotexport.capture.trace.autocast import other_autocast
from aotexport.capture.trace.example_values import ExampleValues
from aotexport.capture.trace.fake_kernels import FAKE_KERNELS
from aotexport.capture.trace.fakes import FakeInputs, fake_inputs
from aotexport.capture.trace.flat_call import FlatCall
from aotexport.capture.trace.forward_capture import Binding, ForwardCapture
from aotexport.capture.trace.key_order import other_orders
from aotexport.capture.trace.larger_examples import holds_for, larger_tensors
from aotexport.capture.trace.python_operators import custom_operators, traced_operators
from aotexport.capture.trace.reading_values import READING_VALUES
from aotexport.capture.trace.second_trace import same_in_both_modes
from aotexport.capture.trace.shapes import SizeFixed, check_not_fixed
from aotexport.capture.trace.strategies import STRATEGIES, Strategy
from aotexport.errors import AotExportError, ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.model.reach import reached_tensors
from aotexport.model.source_lines import described, is_user_frame
from aotexport.model.state import State, StateEntry
from aotexport.process.quiet import quiet
from aotexport.torch_internals.checks import insert_data_dependent_checks
from aotexport.torch_internals.names import FakeTensor, GuardOnDataDependentSymNode, OpOverload
from aotexport.torch_internals.patches import average_in_tensors, exporting_hidden, fake_kernels, masks_unread
from aotexport.torch_internals.subclasses import is_wrap
from aotexport.torch_internals.tracing import trace_forward
from aotexport.torch_internals.transforms import has_transforms, raised_in_transform, transforms_left
from aotexport_runtime.values import meshes
from aotexport_runtime.values.subclasses import inner_tensor
from aotexport_runtime.values.trees import arrays_in

_LOGGERS = ("torch.export", "torch._dynamo", "torch.fx", "torch._subclasses")
"""Of what torch says while it traces; what fails, the export says itself."""


class NotCaptured(ExportFailed):
    """No strategy could trace the call; says why, per strategy."""


def capture_forward(call: ExampleCall, state: State, *, grad: bool = True) -> ForwardCapture:
    """Trace the call by the first strategy that can.

    Args:
        call: the example call; the module is in the wanted mode.
        state: its state; constants that the trace finds are added.
        grad: whether the program is for calls that record gradients.

    Raises:
        NotCaptured: no strategy could; says why, with the user's line.
        ExportFailed: the model does what a bundle cannot hold.
    """
    reasons: list[str] = []
    branches = False
    arrays = arrays_in(parameter.tree for parameter in call.parameters)
    fixed: SizeFixed | None = None
    narrow: tuple[ForwardCapture, list[StateEntry]] | None = None
    direct: ForwardCapture | None = None
    for strategy in STRATEGIES:
        if (strategy.follows_values and not branches) or (arrays and not strategy.takes_arrays):
            continue
        # Code that asked for a size (`int(size)`) may be followed without, by reading it.
        if (fixed is not None or narrow is not None) and not strategy.reads_code:
            continue
        known = len(state.entries)
        try:
            with quiet(*_LOGGERS), transforms_left(), launches_traced():
                captured = _trace(call, state, strategy.prepare(call), strategy, grad)
                if strategy.name == "direct":
                    captured = direct = _as_in_eager(captured, call, state, strategy, known)
            if direct is not None and captured is not direct:
                check_nothing_lost(direct, captured)
            check_not_fixed(captured, call.paths)
            if not captured.function.asks or strategy.reads_code:
                return captured
            narrow = captured, state.entries[known:]
            del state.entries[known:]
        except SizeFixed as error:
            fixed = fixed or error
            del state.entries[known:]
        except AotExportError as error:
            if strategy.name in ("direct", "example's path"):
                raise
            reasons.append(f"{strategy.name}: {error}")
        except Exception as error:
            branches = branches or isinstance(error, GuardOnDataDependentSymNode)
            reasons.append(f"{strategy.name}: {described(error)}")
    if fixed is not None:
        raise fixed
    if narrow is not None:
        captured, constants = narrow
        state.entries += constants
        return captured
    listed = "\n".join(f"  - {reason}" for reason in reasons)
    raise NotCaptured(
        f"`{call.name}` cannot be captured as a graph. What was tried:\n{listed}\n"
        "Python code that leaves torch, or makes sizes of values, is the usual cause: use torch's operators, "
        "`torch._check` for sizes, or a custom operator (torch.library.custom_op)"
    )


def _as_in_eager(
    captured: ForwardCapture, call: ExampleCall, state: State, strategy: Strategy, known: int
) -> ForwardCapture:
    """Return a trace of the code that runs in eager, where the code calls custom operators only while it is traced.

    Libraries put what compilers do not take into operators of their own, and ask `torch.compiler.is_compiling()`.
    """
    if not custom_operators(captured.graph):
        return captured
    constants = state.entries[known:]
    del state.entries[known:]
    # Code that cannot be traced as it runs in eager is why it asks.
    with contextlib.suppress(Exception), exporting_hidden():
        other = _trace(call, state, strategy.prepare(call), strategy, captured.function.grad)
        if not custom_operators(other.graph):
            return other
    state.entries[known:] = constants
    return captured


def _trace(call: ExampleCall, state: State, target: Any, strategy: Strategy, grad: bool) -> ForwardCapture:
    larger = None if strategy.follows_values else larger_tensors(call)
    if larger is not None:
        known = len(state.entries)
        # Code that refuses other sizes than the example's is traced with the example's own.
        with contextlib.suppress(Exception):
            captured = _trace_as(fake_inputs(call, state, larger), call, state, target, strategy, grad)
            if holds_for(call, captured):
                return captured
        del state.entries[known:]
    return _trace_as(fake_inputs(call, state), call, state, target, strategy, grad)


def _trace_as(
    fakes: FakeInputs, call: ExampleCall, state: State, target: Any, strategy: Strategy, grad: bool
) -> ForwardCapture:
    known = len(state.entries)
    entries = {id(entry.tensor): index for index, entry in enumerate(state.entries)}
    shared = {index: entries[id(t)] for index, t in enumerate(call.tensors) if id(t) in entries}
    own = [index for index in range(len(call.tensors)) if index not in shared]
    values = ExampleValues([*(entry.tensor for entry in state.entries), *(call.tensors[index] for index in own)])
    outside = reached_tensors((call.callable, call.module))
    flat = FlatCall(call, target, State(list(state.entries)), shared, values, grad, fakes, outside)
    inputs = [*fakes.state, *[fakes.arguments[index] for index in own]]
    calls = TracedCalls()
    assert fakes.mode.shape_env is not None
    following = values.followed(fakes.mode.shape_env) if strategy.follows_values else contextlib.nullcontext()
    watching = mode_watched(target, call.module) if strategy.name == "direct" else contextlib.nullcontext()
    with fakes.tracing(), average_in_tensors(), fake_kernels(FAKE_KERNELS), following, watching as modes:
        graph = _graph(flat, lambda: fakes.twins(inputs), fakes, calls)
    asks_modes = modes is None or modes.asked or "grad_mode" in flat.effects.reads
    if (
        flat.effects.reads == {"grad_mode"}
        and not strategy.follows_values
        and _same_in_other_mode(flat, graph, fakes, own)
    ):
        flat.effects.reads.clear()
    if _asks_for_autocast(flat, strategy) and not _same_under_other_autocast(flat, strategy, graph, fakes, own):
        flat.effects.reads.add("autocast")
    any_order = _dicts_read_by_key(flat, strategy, graph, fakes, own)
    if len(own) > 1 and asks_identity(target, call.module):
        flat.effects.reads.add("identity")
    assert flat.output_tree is not None
    bindings = [Binding(entry=entry) for entry in state.entries[:known]]
    for index, entry in shared.items():
        bindings[entry] = Binding(entry=state.entries[entry], argument=index)
    bindings += [Binding(argument=index) for index in own]
    bindings = [replace(b, is_differentiated=i in flat.differentiated) for i, b in enumerate(bindings)]
    lift_constants_of_bodies(graph)
    for entry in _lift_constants(graph, state):
        if len(fakes.state) < len(state.entries):
            fakes.state.append(fakes.fake(entry.tensor))
        bindings.append(Binding(entry=entry))
        inputs.append(fakes.fake(entry.tensor))
    placeholders = zip(graph.graph.find_nodes(op="placeholder"), bindings, strict=True)
    refuse_hooks_on_state(graph.graph, {node.name: b.entry.names[0] for node, b in placeholders if b.entry})
    make_relative(graph.graph)
    insert_data_dependent_checks(graph, fakes.mode.shape_env)
    graph.graph.eliminate_dead_code(is_impure_node=_keeps_effect)
    bindings, inputs = _drop_unused_state(graph, bindings, inputs)
    if grad:
        _refuse_computed_state(bindings)
        _refuse_history_by_views(flat.recorded, [binding.entry for binding in bindings if binding.entry is not None])
        refuse_nested_bodies_that_draw(graph, inputs)
        flat.effects.reads |= asked_of_arguments(graph, inputs)
    graph.recompile()
    return ForwardCapture(
        graph,
        bindings,
        inputs,
        flat.output_tree,
        flat.rebinds,
        flat.container_changes,
        flat.effects,
        fakes,
        flat,
        strategy.name,
        calls.calls,
        asks_modes,
        any_order,
    )


def _same_in_other_mode(flat: FlatCall, graph: torch.fx.GraphModule, fakes: FakeInputs, own: Sequence[int]) -> bool:
    """Return whether the model does the same in the other grad mode, for all sizes."""
    return _same_again(replace(flat, grad=not flat.grad), graph, fakes, own)


def _asks_for_autocast(flat: FlatCall, strategy: Strategy) -> bool:
    """Return whether autocast around the call may lead the model another way than the trace went.

    What is traced below autograd, as backward passes are, is traced below autocast.
    """
    effects = flat.effects
    return effects.asks_dtypes or effects.takes_gradients or not effects.above_autograd or strategy.name != "direct"


def _same_under_other_autocast(
    flat: FlatCall, strategy: Strategy, graph: torch.fx.GraphModule, fakes: FakeInputs, own: Sequence[int]
) -> bool:
    """Return whether the model does the same with autocast, or, where it surrounds the capture, without."""
    if strategy.follows_values:
        return False
    with other_autocast(flat.call):
        try:
            target = strategy.prepare(flat.call)
        except Exception:
            # What cannot be captured so is not the same, and calls are held to what could be.
            return False
        return _same_again(replace(flat, target=target), graph, fakes, own)


def _dicts_read_by_key(
    flat: FlatCall, strategy: Strategy, graph: torch.fx.GraphModule, fakes: FakeInputs, own: Sequence[int]
) -> frozenset[str]:
    """Return the paths of the dicts of the call whose keys may come in any order."""
    orders = other_orders(flat.call, flat.container_changes) if strategy.name == "direct" else []
    for order in orders:
        other = replace(flat, key_order=order)
        if not _same_again(other, graph, fakes, own) or _given(other) != _given(flat):
            return frozenset()
    return orders[0].paths if orders else frozenset()


def _given(flat: FlatCall) -> Any:
    """Return the structure of what a call returns and changes."""
    return flat.output_tree, flat.container_changes, [(entry.names, index) for entry, index in flat.rebinds]


def _same_again(other: FlatCall, graph: torch.fx.GraphModule, fakes: FakeInputs, own: Sequence[int]) -> bool:
    """Return whether another trace gives the same graph, for all sizes; on fakes of its own."""
    apart = fake_inputs(other.call, other.state, fakes.larger)
    inputs = [*apart.state, *[apart.arguments[index] for index in own]]
    other.fakes = apart
    with apart.tracing(), average_in_tensors(), fake_kernels(FAKE_KERNELS):
        same = same_in_both_modes(graph, lambda: _graph(other, lambda: apart.twins(inputs), apart, TracedCalls()))
    return same and apart.taken_for_granted() == fakes.taken_for_granted()


def _graph(
    flat: FlatCall, make_inputs: Callable[[], list[Any]], fakes: FakeInputs, calls: TracedCalls
) -> torch.fx.GraphModule:
    """Return the trace of `flat`, as far above autograd as what the model does allows, and its calls in `calls`."""
    fixed: Any = {"keeps_frame": is_user_frame, "decompositions": {**READING_VALUES, **traced_operators()}}

    def recorded(*tensors: Any) -> tuple[Any, ...]:
        with calls.recorded(flat.call.module):
            return flat(*tensors)

    def trace(**options: Any) -> torch.fx.GraphModule:
        return trace_forward(recorded, make_inputs(), fakes.mode, **fixed, **options)

    # Gradients are on while the model runs, and what it leaves behind stays in the trace.
    with torch.enable_grad(), masks_unread(), marked_regions():
        graph = None
        try:
            graph = trace()
        except Exception as error:
            if not raised_in_transform(error):
                raise
        if graph is None or has_transforms(graph.graph):
            flat.above_autograd = False
            graph = trace(above_autograd=False)
            insert_regions(graph.graph)
        elif _hides_tensors(graph):
            graph = trace(whole_composites=False)
    return graph


def _keeps_effect(node: torch.fx.Node) -> bool:
    """Return whether a node must stay although nothing uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        pure = (operator.getitem, inner_tensor, meshes.to_local, meshes.redistribute)
        return node.target not in pure and not is_wrap(node.target) and not isinstance(node.target, FromLocal)
    schema = node.target._schema
    pure = not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
    composite_random = ("dropout", "batch_norm", "rrelu", "rnn", "lstm", "gru", "instance_norm", "assert")
    return not pure or any(word in schema.name for word in composite_random)


def _hides_tensors(graph: torch.fx.GraphModule) -> bool:
    """Return whether the model's own backward pass uses what operators computed inside of them."""
    nodes = graph.graph.find_nodes(op="get_attr")
    return any(isinstance(getattr(graph, str(node.target), None), FakeTensor) for node in nodes)


def _lift_constants(graph: torch.fx.GraphModule, state: State) -> list[StateEntry]:
    """Turn tensors that the code closes over into placeholders, one per tensor; return their state entries."""
    by_target: dict[str, torch.fx.Node] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    by_tensor = {id(entry.tensor): node for entry, node in zip(state.entries, placeholders, strict=False)}
    entries: list[StateEntry] = []
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, str(node.target), None)
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, FakeTensor):
            raise ExportFailed("the model's own backward pass uses a tensor whose making the trace does not show")
        placeholder = by_target.get(str(node.target)) or by_tensor.get(id(tensor))
        if placeholder is None:
            placeholder = new_placeholder(graph, f"constant_{len(entries)}", node.meta.get("val"))
            entries.append(state.add_constant(tensor))
        by_target[str(node.target)] = by_tensor[id(tensor)] = placeholder
        node.replace_all_uses_with(placeholder)
        graph.graph.erase_node(node)
    return entries


def _drop_unused_state(
    graph: torch.fx.GraphModule, bindings: list[Binding], inputs: list[torch.Tensor]
) -> tuple[list[Binding], list[torch.Tensor]]:
    kept: list[int] = []
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if bindings[index].argument is None and not node.users:
            graph.graph.erase_node(node)
        else:
            kept.append(index)
    return [bindings[index] for index in kept], [inputs[index] for index in kept]


def _refuse_computed_state(bindings: Sequence[Binding]) -> None:
    """Refuse state through which eager's gradients flow on to what it was computed from, before the call."""
    for binding in bindings:
        entry = binding.entry
        if entry is not None and binding.argument is None and entry.tensor.grad_fn is not None:
            raise ExportFailed(
                f"`{entry.names[0]}` was computed from other tensors before the call ({entry.tensor.grad_fn.name()}), "
                "and gradients would flow on to those. Compute it in the call, or detach it"
            )


def _refuse_history_by_views(recorded: Sequence[StateEntry], used: Sequence[StateEntry]) -> None:
    """Refuse gradients from one tensor of the state to another that is a view of the same memory."""
    for entry, other in itertools.product(recorded, used):
        if other is not entry and _base(other.tensor) is _base(entry.tensor):
            raise ExportFailed(
                f"the call writes values that require grad to `{entry.names[0]}`, and uses `{other.names[0]}`, which "
                "is a view of the same memory: a bundle keeps no gradients between the two. Keep one of them as a "
                "buffer, and take the other from it in the call"
            )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
