"""Trace a call again in another grad mode, under another autocast, or with keys of dicts in another order.

If the trace is the same, the program is not fixed to the fact that the code asked for: most code that asks whether
gradients are on asks for another reason.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx.node import map_arg

from aotexport.capture.effects.checkpoints import enter_checkpoint, exit_checkpoint
from aotexport.capture.effects.hooks import apply_hook
from aotexport.capture.effects.module_calls import TracedCalls
from aotexport.capture.effects.own_code import own_code
from aotexport.capture.effects.record import Read
from aotexport.capture.trace.autocast import leaves_dtypes_alone, other_autocast
from aotexport.capture.trace.fakes import FakeInputs, fake_inputs
from aotexport.capture.trace.flat_call import FlatCall
from aotexport.capture.trace.key_order import other_orders
from aotexport.capture.trace.larger_examples import calls_of_other_sizes
from aotexport.capture.trace.reshaped_state import Reshaped, geometry, only_prepares, put_left, put_symbols, refuse
from aotexport.capture.trace.trace import Trace, trace_graph
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.torch_internals.general_sizes import zero_and_one_symbolic
from aotexport.torch_internals.tracing import stamped
from aotexport.values.same_tensors import are_same

_MARKS = (enter_checkpoint, exit_checkpoint)
_IDLE_WITHOUT_GRADIENTS = (*_MARKS, apply_hook)
_CALLS = 8
"""Number of calls in a row that are traced."""
_OTHER_TEXT = 1_000_000_007
"""Added to sizes in text: no key of the model's own is that large, and no text of a size that long."""


def reads_of(trace: Trace) -> frozenset[Read]:
    """Return the facts of a call that the model's code depends on; see `Program.fixed`."""
    flat = trace.function
    reads = set(flat.effects.reads)
    asks_grad = "grad_mode" in reads and trace.strategy.grad and not trace.strategy.follows_values
    if asks_grad and _again(trace, grad=not flat.grad) is not None:
        reads.remove("grad_mode")
    if _may_depend_on_autocast(trace) and not _same_under_other_autocast(trace):
        reads.add("autocast")
    if len(flat.own) > 1 and _asks_identity(flat.target, flat.call.module):
        reads.add("identity")
    return frozenset(reads)


def texts_are_keys(trace: Trace) -> bool:
    """Return whether the model does the same where the text that it makes of sizes is another one."""
    return _again(trace, added_in_text=_OTHER_TEXT) is not None


def refuse_reshaped_state(trace: Trace, reads: frozenset[Read]) -> None:
    """Refuse state whose shape, dtype or layout calls change, if a later call may do something else for that.

    Raises:
        ExportFailed: names the tensor.
    """
    own, known = trace.function.reshaped, trace.function.state.reshaped
    others = [pair for pair in known if all(pair[0] is not entry for entry, _ in own)]
    if not own and not others:
        return
    if not trace.strategy.is_direct or "layout" in reads:
        refuse(own or others)
    repeats = None if others else _repeats(trace)
    if repeats is None:
        repeats = _is_general(trace, [*own, *others])
    if not repeats and not others:
        flat = trace.function
        sizes = calls_of_other_sizes(flat.call)
        repeats = only_prepares(flat.call, sizes, flat.state, [entry for entry, _ in own], grad=flat.grad)
    if not repeats:
        refuse(own or others)


def _repeats(trace: Trace) -> bool | None:
    """Return whether later calls, which find the state as calls leave it, do the same as the first.

    They are traced until they leave what an earlier one left; None: that does not come about, or sizes are dynamic.
    """
    flat = trace.function
    seen: list[Any] = []
    for _ in range(_CALLS):
        left = geometry(flat.reshaped)
        if left is None or left in seen or not flat.reshaped:
            return None if left is None else True
        seen.append(left)
        fakes = _fakes(trace)
        put_left(fakes, flat.state, flat.reshaped)
        if (other := _again(trace, fakes)) is None:
            return False
        flat = other
    return None


def _is_general(trace: Trace, reshaped: Reshaped) -> bool:
    """Return whether the model does the same whatever the sizes are that calls change: it asks nothing about them."""
    with zero_and_one_symbolic(symbolic=True):
        fakes = _fakes(trace)
        symbols = put_symbols(fakes, trace.function.state, reshaped)
        return symbols is not None and _again(trace, fakes, symbols) is not None


def _fakes(trace: Trace) -> FakeInputs:
    return fake_inputs(trace.function.call, trace.function.state, trace.function.fakes.larger)


def dicts_read_by_key(trace: Trace) -> frozenset[str]:
    """Return the paths of the dicts of the call whose keys may come in any order."""
    flat = trace.function
    orders = other_orders(flat.call, flat.container_changes) if trace.strategy.is_direct else []
    same = all(_again(trace, key_order=order) is not None for order in orders)
    return orders[0].paths if orders and same else frozenset()


def _returned(flat: FlatCall) -> Any:
    """Return the structure of the values that a call returns and changes."""
    return flat.output_tree, flat.container_changes, [(entry.names, index) for entry, index in flat.rebinds]


def _may_depend_on_autocast(trace: Trace) -> bool:
    """Return whether autocast around the call may lead the model another way than the trace went.

    Anything traced below autograd, such as backward passes, is traced below autocast too. Reads of dtypes in functions
    that operators take are not all recorded.
    """
    effects = trace.function.effects
    if effects.asks_autocast or effects.takes_gradients or not effects.above_autograd or not trace.strategy.is_direct:
        return True
    if any(isinstance(child, torch.fx.GraphModule) for child in trace.graph.children()):
        return True
    return not leaves_dtypes_alone(trace.function.call, effects.dtypes_read)


def _same_under_other_autocast(trace: Trace) -> bool:
    """Return whether the model does the same with autocast, or without if the capture is under autocast."""
    if trace.strategy.follows_values:
        return False
    with other_autocast(trace.function.call):
        try:
            with attempt("trace under another autocast"):
                target = trace.strategy.prepare(trace.function.call)
        except ExportFailed:
            # A failed capture is not the same.
            return False
        return _again(trace, target=target) is not None


def _again(
    trace: Trace, fakes: FakeInputs | None = None, symbols: Collection[Any] = (), **changes: Any
) -> FlatCall | None:
    """Trace the call once more with changes, on fakes of its own.

    Args:
        trace: the first trace.
        fakes: the fakes; None: such as the first trace had.
        symbols: symbols that only these fakes have.
        changes: of the call.

    Returns:
        The changed call as it ran; None: the graph or the structure of what it returns differs, it holds for other
            sizes, or it cannot be traced.
    """
    # Data-dependent numbers get new names, and new checks with them, in every trace.
    if any(node.meta.get("unbacked_bindings") for node in trace.graph.graph.nodes):
        return None
    flat = trace.function
    fakes = fakes or _fakes(trace)
    other = replace(flat, fakes=fakes, **changes)
    try:
        with attempt("second trace"), stamped(_ended_where_it_differs(trace)):
            ignored = _IDLE_WITHOUT_GRADIENTS if flat.grad and not other.grad else _MARKS
            same = _same(trace.graph, trace_graph(other, TracedCalls()), ignored)
    except ExportFailed:
        # A trace that failed or was ended is not the same.
        return None
    same = same and _returned(other) == _returned(flat)
    return other if same and fakes.taken_for_granted(symbols) == flat.fakes.taken_for_granted() else None


def _ended_where_it_differs(trace: Trace) -> Callable[[torch.fx.Node], None]:
    """Return a function to call with each new node of a second trace, which ends that trace once it is another.

    It raises `ExportFailed` where an operator of the first graph has other arguments. Where nodes come in another
    order, only the whole graphs tell: arithmetic of sizes that nothing uses is removed in the end.
    """
    in_order = iter(trace.order if all(node.graph is trace.graph.graph for node in trace.order) else ())
    twins: dict[torch.fx.Node, torch.fx.Node] = {}

    def compare(twin: torch.fx.Node) -> None:
        nonlocal in_order
        node = next(in_order, None)
        if node is None:
            return
        twins[node] = twin
        if (node.op, node.target) != (twin.op, twin.target):
            in_order = iter(())
        elif not node._erased and map_arg((node.args, node.kwargs), twins.get) != (twin.args, twin.kwargs):
            in_order = iter(())
            raise ExportFailed(f"a second trace differs at `{node.name}`")

    return compare


def _same(one: torch.fx.GraphModule, other: torch.fx.GraphModule, ignored: Sequence[Any]) -> bool:
    nodes = [list(_nodes(graph, ignored)) for graph in (one, other)]
    if len(nodes[0]) != len(nodes[1]):
        return False
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    for node, twin in zip(*nodes, strict=True):
        if node.op != twin.op:
            return False
        if node.op == "get_attr":
            if not _same_attribute(getattr(one, node.target, None), getattr(other, twin.target, None), ignored):
                return False
        elif node.target != twin.target:
            return False
        if map_arg((node.args, node.kwargs), twins.__getitem__) != (twin.args, twin.kwargs):
            return False
        twins[node] = twin
    return True


def _nodes(graph: torch.fx.GraphModule, ignored: Sequence[Any]) -> Iterator[torch.fx.Node]:
    for node in graph.graph.nodes:
        serves_ignored = node.op == "get_attr" and node.users and all(user.target in ignored for user in node.users)
        if node.target not in ignored and not serves_ignored:
            yield node


def _same_attribute(one: Any, other: Any, ignored: Sequence[Any]) -> bool:
    if isinstance(one, torch.fx.GraphModule) and isinstance(other, torch.fx.GraphModule):
        return _same(one, other, ignored)
    # What `torch.tensor` makes is another object in each trace.
    made = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and are_same(one, other)
    return one is not None and (one is other or made)


_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")


def _asks_identity(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> bool:
    """Return whether the model's own code asks: by `is` of variables or items, `id` of a variable, or a set of them."""
    return any(map(_asks, own_code(target, module)))


def _asks(code: CodeType) -> bool:
    found = list(dis.get_instructions(code))
    for before, here, ask in zip(found, found[1:], found[2:], strict=False):
        # Newer Pythons load two variables, or store one and load another, by one instruction.
        if ask.opname == "IS_OP" and (_is_item(here) or (_is_variable(here) and _is_first(before, here))):
            return True
        if ask.opname == "BUILD_SET" and (ask.arg or 0) > 1 and _is_variable(here):
            return True
        if here.opname == "LOAD_GLOBAL" and here.argval == "id" and _is_variable(ask):
            return True
    return False


def _is_first(before: dis.Instruction, second: dis.Instruction) -> bool:
    """Return whether the operand before `second` is a variable or an item, too."""
    return second.opname.count("LOAD_") == 2 or _is_item(before) or any(name in before.opname for name in _VARIABLE)


def _is_variable(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(_VARIABLE)


def _is_item(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (instruction.opname, instruction.argrepr) == ("BINARY_OP", "[]")
