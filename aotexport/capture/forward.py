"""The forward graph: the program before autograd, with its in-place mutations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from aotexport.capture.effects.questions import QUESTIONS, Question, own_code
from aotexport.capture.effects.record import Read
from aotexport.capture.passes.contract import Draft
from aotexport.capture.passes.launches import launches_traced
from aotexport.capture.passes.order import run_passes
from aotexport.capture.trace.declared_sizes import larger_tensors
from aotexport.capture.trace.experiments import dicts_read_by_key, differs, reads_of, refuse_reshaped_state
from aotexport.capture.trace.fakes import FakeInputs, fake_inputs
from aotexport.capture.trace.flat_call import FlatCall, trace_call
from aotexport.capture.trace.forward_capture import Answer, Binding, ForwardCapture
from aotexport.capture.trace.python_operators import custom_operators
from aotexport.capture.trace.shapes import SizeFixed, check_not_fixed, holds_for
from aotexport.capture.trace.strategies import STRATEGIES, Strategy
from aotexport.errors import AotExportError, ExportFailed, ModelFileInvalid
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described
from aotexport.model.state import State
from aotexport.process.blocks import quiet
from aotexport.state.world import attributes_restored
from aotexport.torch_internals.names import SET_GRAD_ENABLED, GuardOnDataDependentSymNode
from aotexport.torch_internals.patches import exporting_hidden
from aotexport.torch_internals.transforms import transforms_left
from aotexport_runtime.values.trees import arrays_in

_LOGGERS = ("torch.export", "torch._dynamo", "torch.fx", "torch._subclasses")
"""Torch's loggers to silence during a trace; the export reports failures itself."""


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
    arrays = arrays_in(parameter.tree for parameter in call.parameters)
    fixed: SizeFixed | None = None
    narrow: ForwardCapture | None = None
    direct: ForwardCapture | None = None
    for strategy in STRATEGIES:
        if (
            (strategy.follows_values and not branches)
            or (grad and not strategy.grad)
            or (arrays and not strategy.takes_arrays)
        ):
            continue
        # Code that asked for a size (`int(size)`) may be traceable by a strategy that reads the code.
        if (fixed is not None or narrow is not None) and not strategy.reads_code:
            continue
        try:
            with attempt("forward graph"), quiet(*_LOGGERS), transforms_left(), launches_traced():
                captured = _capture(call, state, strategy, grad)
                if strategy.is_direct:
                    captured = direct = _as_in_eager(captured, call, state, strategy)
            if direct is not None and captured is not direct:
                check_nothing_lost(direct, captured)
            check_not_fixed(captured, call.paths)
            if not captured.function.asks:
                return captured
            narrow = captured
        except SizeFixed as error:
            fixed = fixed or error
        except (ExportFailed, ModelFileInvalid) as failure:
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


def _as_in_eager(captured: ForwardCapture, call: ExampleCall, state: State, strategy: Strategy) -> ForwardCapture:
    """Return a trace of the code as it runs in eager, where it calls custom operators only under a compiler.

    Libraries wrap code that compilers cannot take in operators, and ask `torch.compiler.is_compiling()` when to use
    them.
    """
    if not custom_operators(captured.graph):
        return captured
    # Code asks when its eager form cannot be traced.
    with contextlib.suppress(ExportFailed, ModelFileInvalid), attempt("trace as in eager"), exporting_hidden():
        other = _capture(call, state, strategy, captured.function.grad)
        if not custom_operators(other.graph):
            return other
    return captured


def _capture(call: ExampleCall, state: State, strategy: Strategy, grad: bool) -> ForwardCapture:
    # Some strategies run the code, and fail on the way.
    with attributes_restored(call.module):
        target = strategy.prepare(call)
    larger = None if strategy.follows_values else larger_tensors(call)
    if larger is not None:
        # Code that refuses other sizes than the example's is traced with the example's own.
        with contextlib.suppress(ExportFailed, ModelFileInvalid), attempt("trace of larger sizes"):
            captured = _capture_with(fake_inputs(call, state, larger), call, state, strategy, target, grad)
            if holds_for(call, captured):
                return captured
    return _capture_with(fake_inputs(call, state), call, state, strategy, target, grad)


def _capture_with(
    fakes: FakeInputs, call: ExampleCall, state: State, strategy: Strategy, target: Any, grad: bool
) -> ForwardCapture:
    """Trace the call on fake inputs, and turn the trace into a forward graph."""
    flat = trace_call(call, state, strategy, target, fakes, grad=grad)
    if differs(flat, "text"):
        fakes = fake_inputs(call, state, fakes.larger)
        flat = trace_call(call, state, strategy, target, fakes, grad=grad, texts_hold=True)
    reads, any_order = reads_of(flat), dicts_read_by_key(flat)
    refuse_reshaped_state(flat, reads)
    draft = run_passes(_draft(flat, reads))
    return ForwardCapture(
        graph=draft.graph,
        bindings=draft.bindings,
        inputs=draft.inputs,
        constants=draft.state[len(state.entries) :],
        effects=replace(flat.effects, reads=set(draft.reads)),
        fakes=fakes,
        function=flat,
        any_order=any_order,
    )


def _draft(flat: FlatCall, reads: frozenset[Read]) -> Draft:
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
    if _leaves_gradients_off(capture.graph.graph):
        yield "the grad mode that the call leaves"


def _leaves_gradients_off(graph: torch.fx.Graph) -> bool:
    switches = list(graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED))
    return bool(switches) and switches[-1].args[0] is False
