"""The forward graph: the program before autograd, with its in-place mutations."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from aotexport.capture.passes.draft import draft_of
from aotexport.capture.passes.launches import launched_kernels, launches_traced
from aotexport.capture.passes.order import run_passes
from aotexport.capture.trace.declared_sizes import larger_tensors
from aotexport.capture.trace.experiments import traced
from aotexport.capture.trace.fakes import FakeInputs, fake_inputs
from aotexport.capture.trace.forward_capture import ForwardCapture, check_nothing_lost
from aotexport.capture.trace.python_operators import custom_operators
from aotexport.capture.trace.reshaped_state import refuse_reshaped_state
from aotexport.capture.trace.shapes import SizeFixed, check_not_fixed, holds_for
from aotexport.capture.trace.strategies import STRATEGIES, Strategy
from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described
from aotexport.model.state import State
from aotexport.process.blocks import quiet
from aotexport.torch_internals.names import GuardOnDataDependentSymNode
from aotexport.torch_internals.patches import exporting_hidden
from aotexport.torch_internals.transforms import transforms_left
from aotexport_runtime.errors import AotExportError

_LOGGERS = ("torch.export", "torch._dynamo", "torch.fx", "torch._subclasses")
"""Torch's loggers to silence during a trace; the export reports failures itself."""
_REFUSALS = (ExportFailed, ModelFileInvalid)


class NotCaptured(ExportFailed):
    """No strategy could trace the call; the message says why, per strategy."""


def capture_forward(call: ExampleCall, state: State, *, grad: bool = True) -> ForwardCapture:
    """Trace the call by the first strategy that can.

    Args:
        call: the example call; the module is in the wanted mode.
        state: its state; constants that the trace finds are added.
        grad: whether the program is for calls that record gradients.

    Raises:
        NotCaptured: no strategy could; says why, with the user's line.
        ExportFailed: the model does something that a bundle cannot hold.
    """
    captured = _by_first_strategy(call, state, grad)
    state.entries += captured.constants
    return captured


def _by_first_strategy(call: ExampleCall, state: State, grad: bool) -> ForwardCapture:
    reasons: dict[str, list[str]] = {}
    branches = False
    fixed: SizeFixed | None = None
    narrow: ForwardCapture | None = None
    direct: ForwardCapture | None = None
    for strategy in STRATEGIES:
        if (
            (strategy.follows_values and not branches)
            or (grad and not strategy.grad)
            or (call.arrays and not strategy.runs_own_code)
        ):
            continue
        # Code that asked for a size (`int(size)`) may be traceable by a strategy that reads the code.
        if (fixed is not None or narrow is not None) and not strategy.reads_code:
            continue
        try:
            with attempt("forward graph"), quiet(*_LOGGERS), transforms_left(), launches_traced():
                captured = _capture(call, state, strategy, grad)
                direct = captured if strategy.is_direct else direct
            if direct is not None and captured is not direct:
                check_nothing_lost(direct, captured)
            check_not_fixed(captured, call.paths)
            if not captured.function.asks:
                return captured
            narrow = captured
        except SizeFixed as error:
            fixed = fixed or error
        except _REFUSALS as failure:
            error = failure.error if isinstance(failure, ExportFailed) else failure
            says_why = isinstance(error, AotExportError)
            if says_why and strategy.runs_own_code and narrow is None and fixed is None:
                raise error from error.__cause__
            branches = branches or isinstance(error, GuardOnDataDependentSymNode)
            reasons.setdefault(str(error) if says_why else described(error), []).append(strategy.name)
    if narrow is not None:
        return narrow
    if fixed is not None:
        raise fixed
    listed = "\n".join(f"  - {reason} (by {', '.join(names)})" for reason, names in reasons.items())
    raise NotCaptured(
        f"`{call.name}` cannot be captured as a graph. What was tried:\n{listed}\n"
        "Python code that leaves torch, or makes sizes of values, is the usual cause: use torch's operators, "
        "`torch._check` for sizes, or a custom operator (torch.library.custom_op)"
    )


def _capture(call: ExampleCall, state: State, strategy: Strategy, grad: bool) -> ForwardCapture:
    """Capture the call; as it runs in eager, where it calls custom operators only under a compiler.

    Libraries wrap code that compilers cannot take in operators, and ask `torch.compiler.is_compiling()` when to use
    them.
    """
    captured = _in_any_size(call, state, strategy, grad)
    if strategy.is_direct and captured.custom_operators:
        # Code asks when its eager form cannot be traced.
        with contextlib.suppress(*_REFUSALS), attempt("trace as in eager"), exporting_hidden():
            other = _in_any_size(call, state, strategy, grad)
            return captured if other.custom_operators else other
    return captured


def _in_any_size(call: ExampleCall, state: State, strategy: Strategy, grad: bool) -> ForwardCapture:
    """Capture the call in larger sizes if that holds for the example's, else in the example's."""
    target = strategy.target(call)
    larger = None if strategy.follows_values else larger_tensors(call)
    if larger is not None:
        # Code may refuse other sizes than the example's.
        with contextlib.suppress(*_REFUSALS), attempt("trace of larger sizes"):
            captured = _capture_with(fake_inputs(call, state, larger), call, state, strategy, target, grad)
            if holds_for(call, captured):
                return captured
    return _capture_with(fake_inputs(call, state), call, state, strategy, target, grad)


def _capture_with(
    fakes: FakeInputs, call: ExampleCall, state: State, strategy: Strategy, target: Any, grad: bool
) -> ForwardCapture:
    """Trace the call on fake inputs, and turn the trace into a forward graph."""
    found = traced(call, state, strategy, target, fakes, grad=grad)
    refuse_reshaped_state(found)
    draft = run_passes(draft_of(found.flat, found.reads))
    return ForwardCapture(
        graph=draft.graph,
        bindings=draft.bindings,
        inputs=draft.inputs,
        constants=draft.state[len(state.entries) :],
        effects=replace(found.flat.effects, reads=set(draft.reads)),
        fakes=found.flat.fakes,
        function=found.flat,
        any_order=found.any_order,
        custom_operators=custom_operators(draft.graph),
        launched=launched_kernels(draft.graph),
    )
