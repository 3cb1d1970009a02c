"""One table of experiments: trace a call again with one thing changed, and see whether the trace is the same.

If it is, the program is not fixed to a fact that the code asked for: most code asks for another reason.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch.fx.node import map_arg

from aotexport.capture.effects.checkpoints import enter_checkpoint, exit_checkpoint
from aotexport.capture.effects.hooks import apply_hook
from aotexport.capture.effects.module_calls import TracedCalls
from aotexport.capture.effects.questions import own_code
from aotexport.capture.effects.record import Read
from aotexport.capture.trace.autocast import leaves_dtypes_alone, other_autocast
from aotexport.capture.trace.fakes import FakeInputs, fake_inputs
from aotexport.capture.trace.flat_call import FlatCall, trace_call, trace_graph
from aotexport.capture.trace.key_order import other_orders
from aotexport.capture.trace.strategies import Strategy
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport.model.state import State
from aotexport.values.same_tensors import are_same

_MARKS = (enter_checkpoint, exit_checkpoint)
_IDLE_WITHOUT_GRADIENTS = (*_MARKS, apply_hook)
_OTHER_TEXT = 1_000_000_007
"""Added to sizes in text: no key of the model's own is that large, and no text of a size that long."""


def _texts(flat: FlatCall) -> list[dict[str, Any]]:
    return [{"added_in_text": _OTHER_TEXT}] if flat.makes_text and flat.added_in_text is not None else []


def _grad_modes(flat: FlatCall) -> list[dict[str, Any]]:
    asks = "grad_mode" in flat.effects.reads and flat.strategy.grad and not flat.strategy.follows_values
    return [{"grad": not flat.grad}] if asks else []


def _autocasts(flat: FlatCall) -> list[dict[str, Any]]:
    """Return the other autocast, if it may lead the model another way than the trace went.

    Anything traced below autograd, such as backward passes, is traced below autocast too. Reads of dtypes in functions
    that operators take are not all recorded.
    """
    effects, call = flat.effects, flat.call
    asks = effects.asks_autocast or effects.takes_gradients or not effects.above_autograd or not flat.strategy.is_direct
    asks = asks or any(isinstance(child, torch.fx.GraphModule) for child in flat.graph.children())
    return [{"autocast": other_autocast(call)}] if asks or not leaves_dtypes_alone(call, effects.dtypes_read) else []


def _key_orders(flat: FlatCall) -> list[dict[str, Any]]:
    orders = other_orders(flat.call, flat.container_changes) if flat.strategy.is_direct else []
    return [{"key_order": order} for order in orders]


EXPERIMENTS: dict[str, Callable[[FlatCall], list[dict[str, Any]]]] = {
    "text": _texts,
    "grad_mode": _grad_modes,
    "autocast": _autocasts,
    "key_order": _key_orders,
}
"""What to change of a call in further traces, by the fact that they tell of; nothing where it is not asked."""


@dataclass(frozen=True)
class Found:
    """A traced call, and what further traces of it show.

    Attributes:
        reads: facts of a call that the model's code depends on, see `Program.fixed`.
        any_order: paths of dicts of the call whose keys may come in any order.
    """

    flat: FlatCall
    reads: frozenset[Read]
    any_order: frozenset[str]


def traced(
    call: ExampleCall, state: State, strategy: Strategy, target: Any, fakes: FakeInputs, *, grad: bool, **holds: bool
) -> Found:
    """Trace a call, and again with one thing changed where its code asks for that; see `trace_call`."""
    flat = trace_call(call, state, strategy, target, fakes, grad=grad, **holds)
    reads: set[Any] = set(flat.effects.reads)
    any_order = frozenset[str]()
    for fact, changed in EXPERIMENTS.items():
        changes = changed(flat)
        same = all(again(flat, **change) is not None for change in changes)
        if fact == "text" and not same:
            return traced(call, state, strategy, target, fakes_like(flat), grad=grad, texts_hold=True)
        if fact == "key_order":
            any_order = frozenset().union(*(change["key_order"].paths for change in changes if same))
        elif changes:
            (reads.discard if same else reads.add)(fact)
    if len(flat.own) > 1 and any(map(_asks_identity, own_code(flat.target, call.module))):
        reads.add("identity")
    return Found(flat, frozenset(reads), any_order)


def fakes_like(flat: FlatCall) -> FakeInputs:
    """Return fakes for another trace, such as the first had."""
    return fake_inputs(flat.call, flat.state, flat.fakes.larger)


def _returned(flat: FlatCall) -> Any:
    """Return the structure of the values that a call returns and changes."""
    return flat.output_tree, flat.container_changes, [(entry.names, index) for entry, index in flat.rebinds]


def again(
    flat: FlatCall,
    fakes: FakeInputs | None = None,
    symbols: Collection[Any] = (),
    autocast: AbstractContextManager[Any] | None = None,
    **changes: Any,
) -> FlatCall | None:
    """Trace the call once more with changes, on fakes of its own.

    Args:
        flat: the call as the first trace ran it.
        fakes: the fakes; None: such as the first trace had.
        symbols: symbols that only these fakes have.
        autocast: around the call; None: that of the first trace.
        changes: of the call.

    Returns:
        The changed call as it ran; None: the graph or the structure of what it returns differs, it holds for other
            sizes, or it cannot be traced.
    """
    fakes = fakes or fakes_like(flat)
    try:
        with attempt("second trace"), autocast or contextlib.nullcontext():
            if autocast is not None:
                if flat.strategy.follows_values:
                    return None
                changes["target"] = flat.strategy.target(flat.call)
            other = replace(flat, fakes=fakes, calls=TracedCalls(), **changes)
            trace_graph(other)
            ignored = _IDLE_WITHOUT_GRADIENTS if flat.grad and not other.grad else _MARKS
            same = _same(flat.graph, other.graph, ignored) and _returned(other) == _returned(flat)
    except ExportFailed:
        return None
    return other if same and fakes.taken_for_granted(symbols) == flat.fakes.taken_for_granted() else None


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


def _asks_identity(code: CodeType) -> bool:
    """Return whether code of the model asks: by `is` of variables or items, `id` of a variable, or a set of them."""
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
