"""Grad-mode regions of the model, made relative to the mode that a call begins in.

At the end of `with torch.no_grad():` a trace sees a switch to its own mode, which would turn gradients on under a
caller's `no_grad`. So the ends of regions directly in the caller's mode are marked, and restore the mode of the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch

from aotexport.process.patches import Patch, caller, patched
from aotexport.torch_internals.names import SET_GRAD_ENABLED
from aotexport.torch_internals.tracing import REQUIRES_GRAD, nodes_annotated, stamped
from aotexport_runtime.execution.higher_order import CallersGradMode

is_grad_enabled = torch.is_grad_enabled
"""Torch's own, also while it is patched."""

_MARK = "restores_ambient_grad_mode"
_MODE, _FUNCTION = "grad_mode", "custom_function"
_OUTSIDE: dict[str, Any] = {"region": False, "mode": None, "backward": False, "function": None}
"""Facts of the code that is traced; `function` is an object of its own for each forward of a custom function."""
_running: ContextVar[dict[str, Any]] = ContextVar("_running")
_REASON = "Mark the ends of grad-mode regions in the trace"


@contextlib.contextmanager
def marked_regions() -> Iterator[None]:
    """Mark the nodes that end a grad-mode region whose outside is the caller's mode, and the nodes inside regions."""
    inside = dict(_OUTSIDE)
    regions = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
    original_init = torch.set_grad_enabled.__init__

    def remember(region: Any, mode: bool | None, entered_by: FrameType) -> None:
        region.__dict__.setdefault("_outer", dict(inside))
        inside["region"] = True
        # Transforms of torch.func switch gradients on for themselves.
        if mode is not None and "_functorch" not in entered_by.f_code.co_filename:
            inside["mode"] = mode

    def enter_of(original: Any) -> Any:
        def enter(self: Any) -> Any:
            remember(self, {torch.no_grad: False, torch.enable_grad: True}.get(type(self)), caller())
            return original(self)

        return enter

    def exit_of(original: Any) -> Any:
        def leave(self: Any, *exception: Any) -> Any:
            outer = self.__dict__.pop("_outer", _OUTSIDE)
            try:
                with nodes_annotated({_MARK: not outer["region"]}):
                    return original(self, *exception)
            finally:
                inside.update(outer)

        return leave

    def init(self: Any, mode: bool) -> None:
        # Torch's compiler restores the mode after it has looked into a subgraph.
        entered_by = caller()
        if "_guards" not in entered_by.f_code.co_filename:
            remember(self, mode, entered_by)
        original_init(self, mode)

    entered = [Patch(region, "__enter__", enter_of(region.__enter__), _REASON) for region in regions]
    left = [Patch(region, "__exit__", exit_of(region.__exit__), _REASON) for region in regions]
    token = _running.set(inside)
    try:
        with (
            patched(*entered, *left, *_of_graphs(inside), Patch(torch.set_grad_enabled, "__init__", init, _REASON)),
            stamped(lambda node: node.meta.update({_MODE: inside["mode"], _FUNCTION: inside["function"]})),
        ):
            yield
    finally:
        _running.reset(token)


def _of_graphs(inside: dict[str, Any]) -> Iterator[Patch]:
    """Yield patches for graphs of loaded bundles, which restore the mode that they began in."""
    begin_graph, restore_mode = CallersGradMode.__init__, CallersGradMode.restore

    def begin(self: Any) -> None:
        begin_graph(self)
        self.__dict__["_outer"] = dict(inside)

    def restore(self: Any) -> None:
        with nodes_annotated({_MARK: not self._outer["region"]}):
            restore_mode(self)
        inside.update(self._outer)

    yield Patch(CallersGradMode, "__init__", begin, _REASON)
    yield Patch(CallersGradMode, "restore", restore, _REASON)


def within_region() -> bool:
    """Return whether the model's code runs inside of a grad-mode region of its own."""
    return bool(_running.get()["region"])


def within_backward() -> bool:
    """Return whether a backward of the model's code is being traced."""
    return bool(_running.get()["backward"])


@contextlib.contextmanager
def traced_as(**facts: Any) -> Iterator[None]:
    """Trace the block with other facts, see `_OUTSIDE`."""
    inside = _running.get()
    before = dict(inside)
    inside.update(facts)
    try:
        yield
    finally:
        inside.update(before)


BACKWARD: dict[str, Any] = {"region": False, "mode": None, "backward": True}
"""Facts of a backward, which does not run in the model's regions."""


def recorded_in_regions(node: torch.fx.Node) -> bool:
    """Return whether autograd records a node's value where gradients are on only in the model's regions.

    Traces, with `marked_regions`, run with gradients on, also those of programs that record none.
    """
    pending, seen = [node], set[torch.fx.Node]()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.op != "call_function" or not each.meta.get(REQUIRES_GRAD, True):
            if each.meta.get(REQUIRES_GRAD):
                return True
        elif each.target is torch.ops.aten.requires_grad_.default:
            if each.args[1:] != (False,):
                return True
        else:
            pending += history_of(each, otherwise=False)
    return False


def history_of(node: torch.fx.Node, *, otherwise: bool = True) -> list[torch.fx.Node]:
    """Return the operands of a node whose history its value may have.

    Args:
        node: of a trace with `marked_regions`.
        otherwise: whether autograd records outside of the model's regions.
    """
    function = node.meta.get(_FUNCTION)  # Autograd records nothing in its forward.
    mode = False if function is not None and function is _running.get()["function"] else node.meta.get(_MODE)
    if otherwise if mode is None else mode:
        return node.all_input_nodes
    # A write under `no_grad` leaves the history of what it writes to.
    schema = getattr(node.target, "_schema", None)
    return node.all_input_nodes[:1] if schema is not None and schema.is_mutable else []


def insert_regions(graph: torch.fx.Graph) -> None:
    """Insert the grad-mode regions of the model into a graph that was traced below them."""
    current: bool | None = None
    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        mode = None if node.op == "output" else node.meta.get(_MODE)
        if mode is not current:
            with graph.inserting_before(node):
                change = graph.call_function(SET_GRAD_ENABLED, (True if mode is None else mode,))
            change.meta.update(val=None, custom={_MARK: mode is None})
            current = mode


def make_relative(graph: torch.fx.Graph) -> None:
    """Let every marked node restore the mode at the start of the graph."""
    marked = [
        node
        for node in graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED)
        if (node.meta.get("custom") or {}).get(_MARK)
    ]
    if not marked:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        ambient = graph.call_function(is_grad_enabled)
    ambient.meta["val"] = True
    for node in marked:
        node.args = (ambient,)
