"""Capture, encode, functionalise and lower one program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aotexport.capture.effects.hooks import refuse_backward_hooks
from aotexport.capture.forward import NotCaptured
from aotexport.capture.functional.capture import capture_functional_graph
from aotexport.capture.passes.launches import refuse_kernels_without_cpu, refuse_launches
from aotexport.capture.programs.forward_graphs import ForwardGraphs
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.eager.failing_example import refuse_failing_example
from aotexport.eager.python_state import depends_on, keeps_results_of_weights
from aotexport.eager.run import runs_without_gradients
from aotexport.encode.inherited import with_inherited, without_refused
from aotexport.encode.program import EncodedProgram, encode_program, with_functional
from aotexport.errors import ExportFailed
from aotexport.lower.build import with_lowered
from aotexport.model.programs import ProgramSpec
from aotexport.model.state import State
from aotexport.pipeline.options import ExportOptions
from aotexport.process.blocks import collected_rarely
from aotexport.process.clock import Clock
from aotexport.state.mode import in_mode
from aotexport.state.world import ChangedOnFirstCall, PythonStateChanged
from aotexport.vectors.paths import shorter_on_path


@collected_rarely()
def capture_program(
    spec: ProgramSpec,
    state: State,
    graphs: ForwardGraphs,
    options: ExportOptions,
    clock: Clock,
) -> EncodedProgram:
    """Return a program with its graphs and its lowered forms.

    Args:
        spec: the program to capture.
        state: the module's state; constants that traces find are added.
        graphs: captures forward graphs over that state.
        options: of the export.
        clock: times the stages.

    Raises:
        ExportFailed: the program holds something that a bundle cannot.
        ChangedOnFirstCall: the module is complete only after a call for real.
        PythonStateChanged: the call stores values in attributes that later calls read.
    """
    if spec.grad:
        refuse_backward_hooks(spec.call.module)
    forward = _forward_graph(spec, state, graphs, options, clock)
    with in_mode(spec.call.module, spec.mode, spec.call.first_call_constants):
        if forward.effects.takes_gradients and not runs_without_gradients(spec.call, state, spec.mode):
            spec = replace(spec, grad=True)
            forward.effects.reads.add("grad_mode")
        program = encode_program(spec, forward, root=options.source_root, strip=options.strip)
        if stored := forward.effects.stored:
            names = ", ".join(f"`{name}`" for name in dict.fromkeys(stored))
            if depends_on(spec, state, shorter_on_path(program, spec.call)):
                raise PythonStateChanged(stored, f"the call stores what later calls read in {names} of the model")
            if spec.grad and keeps_results_of_weights(spec, state):
                raise ChangedOnFirstCall(f"calls compute something of the weights, and later ones find it in {names}")
        program = _with_functional(with_inherited(program, spec.call), spec, forward, options, clock)
    _refuse_lost_backward(program, forward)
    _refuse_lost_launches(program)
    if not spec.without:
        return program
    note = f"calls of program `{spec.variant_of}` may leave out {quoted(spec.without)}: `{spec.name}` serves them"
    return replace(program, notes=(*program.notes, note))


def _with_functional(
    program: EncodedProgram,
    spec: ProgramSpec,
    forward: ForwardCapture,
    options: ExportOptions,
    clock: Clock,
) -> EncodedProgram:
    """Return the program with its functional graph, or the reason why it has none, and with its lowered forms."""
    clock.stage(f"{spec.name}: {'joint' if spec.grad else 'inference'} graph")
    functional = capture_functional_graph(forward, grad=spec.grad, count=clock.count)
    program = with_functional(program, forward, functional, root=options.source_root, strip=options.strip)
    program = without_refused(program, spec.call)
    if options.targets.cuda:
        clock.stage(f"{spec.name}: lower to kernels")
    return with_lowered(program, forward, functional, options.targets)


def quoted(names: Iterable[str]) -> str:
    """Return names as a list in a message."""
    return " and ".join(f"`{name}`" for name in names)


def _forward_graph(
    spec: ProgramSpec, state: State, graphs: ForwardGraphs, options: ExportOptions, clock: Clock
) -> ForwardCapture:
    clock.stage(f"{spec.name}: forward graph")
    try:
        forward = graphs.capture(spec)
    except NotCaptured:
        refuse_failing_example(spec, state)
        raise
    refuse_kernels_without_cpu(forward)
    refuse_launches(forward, grad=spec.grad, compiled=bool(options.targets.cuda))
    return forward


def _refuse_lost_launches(program: EncodedProgram) -> None:
    """Refuse a program with kernels launched by the model that was not lowered: it runs nowhere."""
    if program.launched and not program.lowered:
        raise ExportFailed(
            f"the model launches the Triton kernel `{program.launched[0]}` itself, and {program.notes[-1]}"
        )


def _refuse_lost_backward(program: EncodedProgram, forward: ForwardCapture) -> None:
    """Refuse a program whose gradients no graph holds."""
    record = program.record
    wanted = record.grad and any(getattr(value, "requires_grad", False) for value in forward.inputs)
    if wanted and record.functional is None and not record.forward.differentiable:
        names = ", ".join(f"`{name}`" for name in forward.effects.autograd_functions)
        raise ExportFailed(
            f"program `{record.name}`: the backward of the custom autograd function {names} cannot be captured: "
            f"{record.refusals[-1].reason.rstrip('.')}. Write it with torch's operators, or leave out programs with "
            "gradients (`programs=('infer',)`)"
        )
