"""Capture the programs of an export: those asked for, and variants without labels, for later states and for one row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from aotexport.capture.effects.hooks import refuse_backward_hooks
from aotexport.capture.forward import NotCaptured
from aotexport.capture.functional.capture import capture_functional_graph
from aotexport.capture.passes.launches import refuse_kernels_without_cpu, refuse_launches
from aotexport.capture.programs.forward_graphs import ForwardGraphs, StateReshaped
from aotexport.capture.trace.autocast import autocast_of
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.eager.label_free import with_label_free
from aotexport.eager.python_state import (
    attributes_of,
    depends_on,
    fits,
    initial_values,
    keeps_results_of_weights,
    later_states,
    with_attributes,
)
from aotexport.eager.recorded_arguments import (
    RecordedArguments,
    beginning_at,
    example_arguments,
    name_at,
    rows_of_example,
    symbols_of,
    takes,
)
from aotexport.eager.run import Run, eager_run, made_inputs, refuse_failing_example, runs_without_gradients
from aotexport.encode.inherited import with_inherited, without_refused
from aotexport.encode.program import EncodedProgram, encode_program, with_functional
from aotexport.encode.submodules import encode_submodules
from aotexport.errors import ExportFailed
from aotexport.lower.build import with_lowered
from aotexport.model.ancestry import ancestors_of
from aotexport.model.call import ExampleCall
from aotexport.model.programs import Example, ProgramSpec, check_names, choose_programs
from aotexport.model.refusals import attempt
from aotexport.model.state import State, collect_state
from aotexport.model.step import Step
from aotexport.pipeline.bundle_draft import BundleDraft, write_bundle
from aotexport.pipeline.in_dtype import with_cast
from aotexport.pipeline.options import ExportOptions
from aotexport.pipeline.report import declared_range
from aotexport.pipeline.step import capture_step
from aotexport.process.blocks import collected_rarely
from aotexport.process.clock import Clock
from aotexport.state.mode import in_mode, refuse_own_switches
from aotexport.state.world import ChangedOnFirstCall, PythonStateChanged
from aotexport.vectors.record import accepted_calls, checked_programs, on_path, shorter_on_path
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.program import ArgumentInput
from aotexport_runtime.schema.sizes import Dimension

Captured = tuple[list[ProgramSpec], list[EncodedProgram]]
"""Captured programs, and their encoded forms."""


def choose_calls(
    target: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: ExportOptions,
    clock: Clock,
) -> tuple[list[ProgramSpec], State]:
    """Return the programs to capture, each before its variants, and the state of the module."""
    clock.stage("example call")
    specs = choose_programs(target, Example(args, kwargs, options.dynamic_shapes), options.programs, options.variants)
    module = specs[0].call.module
    state = collect_state(module)
    for spec in specs:
        refuse_own_switches(module, spec.mode, state)
    return specs, state


def capture_programs(specs: list[ProgramSpec], state: State, options: ExportOptions, clock: Clock) -> BundleDraft:
    """Return a draft with every program captured, encoded, made functional and lowered to kernels.

    `specs` has each program before its variants. Constants that traces find are added to `state`.
    """
    specs, notes = with_label_free(specs, state) if options.label_free else (specs, {})
    try:
        specs, programs = _capture_all(specs, state, options, clock)
    except ChangedOnFirstCall:
        # Libraries prepare their modules at the first call: after a call for real, the next leaves the model unchanged.
        with eager_run(specs[0].call, state, specs[0].mode, outside=True, keeps_attributes=True) as run:
            run()
        vars(state).update(vars(collect_state(specs[0].call.module)))
        specs, programs = _capture_all(specs, state, options, clock)
    pairs = zip(specs, programs, strict=True)
    programs = [
        program if program.optimizer else with_cast(spec, program, state, options, clock) for spec, program in pairs
    ]
    whole, attributes = initial_values(specs[0].call, state)
    return BundleDraft(
        options=options,
        specs=tuple(specs),
        programs=tuple(_noted(program, *notes.get(program.record.name, ())) for program in programs),
        state=whole,
        attributes=attributes,
        modules=() if options.strip else encode_submodules(specs[0].call.module),
        ancestors=ancestors_of(specs[0].call, [program.record for program in programs]),
    )


def _capture_all(specs: list[ProgramSpec], state: State, options: ExportOptions, clock: Clock) -> Captured:
    """Capture the programs; start again with attributes as an argument if calls change more that later calls read."""
    known = len(state.entries)
    while True:
        graphs = ForwardGraphs(state)
        capture = functools.partial(capture_program, state=state, graphs=graphs, options=options, clock=clock)
        try:
            captured = _capture_specs(specs, capture)
            if options.autocast is not None:
                captured = _capture_under_autocast(*captured, capture, options.autocast)
            if isinstance(options.step, Step):
                captured = capture_step(*captured, capture, graphs, options.step)
            return _capture_later_states(*captured, capture, state)
        except StateReshaped:
            # The state knows it from now on, and programs that read that tensor are judged by it.
            del state.entries[known:]
        except PythonStateChanged as change:
            if set(change.names) <= set(attributes_of(specs[0].call)):
                raise
            # Tensors that traces found in these attributes are arguments from now on.
            del state.entries[known:]
            try:
                specs = [with_attributes(spec, change.names) for spec in specs]
            except ExportFailed as error:
                raise ExportFailed(f"{change}. They cannot be kept: {error}") from change


def _capture_specs(specs: list[ProgramSpec], capture: Callable[..., EncodedProgram]) -> Captured:
    """Capture the programs; a variant without labels is left out if it cannot be captured."""
    captured, encoded = list[ProgramSpec](), list[EncodedProgram]()
    for spec in specs:
        try:
            encoded.append(capture(spec))
            captured.append(spec)
        except (ChangedOnFirstCall, PythonStateChanged):
            raise
        except ExportFailed as error:
            if not spec.without:
                raise
            index = [each.name for each in captured].index(spec.variant_of or "")
            note = f"calls of program `{spec.variant_of}` must pass {quoted(spec.without)}: {first_line(error)}"
            encoded[index] = _noted(encoded[index], note)
    return captured, encoded


def _capture_under_autocast(
    specs: list[ProgramSpec], programs: list[EncodedProgram], capture: Callable[..., EncodedProgram], dtype: str
) -> Captured:
    """Add a variant under autocast per program whose code does something else then, and note what serves such calls."""
    captured, encoded = list(specs), list[EncodedProgram]()
    variants: list[EncodedProgram] = []
    for spec, program in zip(specs, programs, strict=True):
        name = f"{spec.name}.{dtype}"
        if "autocast" not in program.record.fixed or program.record.autocast == dtype:
            encoded.append(_noted(program, f"calls of program `{spec.name}` under autocast to {dtype} run its graph"))
            continue
        check_names([name])
        variant = replace(spec, name=name, variant_of=spec.variant_of or spec.name, without=(), autocast=dtype)
        with autocast_of(variant):
            variants.append(capture(variant))
        captured.append(variant)
        encoded.append(_noted(program, f"calls of program `{spec.name}` under autocast to {dtype} run `{name}`"))
    return captured, [*encoded, *variants]


def _capture_later_states(
    specs: list[ProgramSpec], programs: list[EncodedProgram], capture: Callable[..., EncodedProgram], state: State
) -> Captured:
    """Add a variant per state of the module's attributes that calls leave, and that no program serves yet."""
    captured, encoded = list(specs), list(programs)
    for spec in [spec for spec in specs if attributes_of(spec.call)]:
        main = spec.variant_of or spec.name
        for later in later_states(spec, state):
            own = [program.record for program in encoded if main in (program.record.name, program.variant_of)]
            if any(fits(record, later.call) for record in own):
                continue
            captured.append(replace(later, name=f"{main}.{len(own) + 1}", variant_of=main, without=()))
            encoded.append(capture(captured[-1]))
    return captured, encoded


def _noted(program: EncodedProgram, *notes: str) -> EncodedProgram:
    return replace(program, notes=(*program.notes, *notes))


# --- one row ----------------------------------------------------------------------------------------------


def with_one_row(draft: BundleDraft, state: State, directory: Path, clock: Clock) -> BundleDraft:
    """Return the draft with a variant per dynamic size of 1 that eager serves, and no program.

    `state` is as `capture_programs` left it. A draft with more programs is to be recorded and verified anew.
    """
    specs, programs, graphs = list(draft.specs), list(draft.programs), ForwardGraphs(state, captured=True)
    places = [(i, each) for i, p in enumerate(programs) if p.optimizer is None for each in p.record.dimensions]
    for index, dimension in places:
        if (call := _unserved(draft, index, dimension, directory)) is None:
            continue
        spec, program, known = specs[index], programs[index], len(state.entries)
        main = spec.variant_of or spec.name
        name = f"{main}.{sum(main in (each.name, each.variant_of) for each in specs) + 1}"
        variant = replace(spec, name=name, call=call, variant_of=main, without=())
        served = f"`{name}` serves 1"
        try:
            with autocast_of(variant):
                captured = capture_program(variant, state, graphs, draft.options, clock)
        except (ExportFailed, StateReshaped) as error:
            del state.entries[known:]
            served = f"a variant that serves 1 cannot be captured: {first_line(error)}"
        else:
            specs.append(variant)
            programs.append(with_cast(variant, captured, state, draft.options, clock))
            if fits(program.record, call):
                program = replace(program, record=beginning_at(program.record, dimension.symbol, 2))
            elif (dimension.min or 0) < 2:
                program = _noted(program, f"calls of program `{spec.name}` with 1 as `{dimension.name}` run `{name}`")
        programs[index] = replace(program, outside={**program.outside, dimension.symbol: served})
    whole, attributes = initial_values(draft.call, state)
    return replace(draft, specs=tuple(specs), programs=tuple(programs), state=whole, attributes=attributes)


def _unserved(draft: BundleDraft, index: int, dimension: Dimension, directory: Path) -> ExampleCall | None:
    """Return a call with one row of the example that eager serves, and no program.

    Only where the program serves two rows: a variant completes a range, and opens none.
    """
    spec, program = draft.specs[index], draft.programs[index]
    record, declared = program.record, declared_range(program.record, dimension, spec.call)
    is_recorded = any((e.program, e.name) == (spec.name, name_at(dimension, 1)) for e in draft.entries)
    is_tensors = isinstance(record.inputs[dimension.input_index], ArgumentInput)
    if is_recorded or not is_tensors or declared is None or (declared[0] or 0) > 1 or program.launched:
        return None
    example = example_arguments(spec.call, record)
    if not takes(record, {**symbols_of(record, example.specs), dimension.symbol: 2}):
        return None
    rows = list(rows_of_example(msgspec.structs.replace(record, guards=()), example, dimension, 1))
    with autocast_of(spec), eager_run(spec.call, draft.state, spec.mode, as_traced=True) as run:
        call = next((call for each in rows if _runs(run, call := _of_one_row(spec.call, each))), None)
        recorded = list(accepted_calls(run, record, rows if call is not None and fits(record, call) else ()))
    main = spec.variant_of or spec.name
    alike = [each.record for each in draft.programs if main in (each.record.name, each.variant_of)]
    if call is None or any(fits(e, call) for e in alike if e is not record and e.autocast == record.autocast):
        return None
    if recorded:
        # Its checks refused another call with one row: for its values, or for the row.
        write_bundle(draft, directory)
        if on_path(directory, checked_programs([program]), recorded)[0]:
            return None
    return call


def _runs(run: Run, call: ExampleCall) -> bool:
    try:
        with attempt("call with one row"):
            run.begin()
            run(call)
    except ExportFailed:
        return False
    return True


def _of_one_row(call: ExampleCall, arguments: RecordedArguments) -> ExampleCall:
    """Return the call with other arguments, and with fixed sizes where these differ."""
    made = dict(zip((spec.path for spec in arguments.specs), made_inputs(call, arguments).values, strict=True))
    tensors = [made.get(path, leaf) for path, leaf in zip(call.paths, call.tensors, strict=True)]
    axes = [
        {axis: size for axis, size in (own or {}).items() if type(leaf) is int or leaf.shape[axis] == other.shape[axis]}
        or None
        for leaf, other, own in zip(call.tensors, tensors, call.axes, strict=True)
    ]
    args, kwargs = call.rebuild(tensors)
    return replace(call, args=args, kwargs=kwargs, tensors=tensors, axes=axes)


@collected_rarely()
def capture_program(
    spec: ProgramSpec, state: State, graphs: ForwardGraphs, options: ExportOptions, clock: Clock
) -> EncodedProgram:
    """Return a program with its graphs and its lowered forms.

    Constants that traces find are added to `state`. Raises `ChangedOnFirstCall` where the module is complete only after
    a call for real, `PythonStateChanged` where the call stores values in attributes that later calls read.
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
    program: EncodedProgram, spec: ProgramSpec, forward: ForwardCapture, options: ExportOptions, clock: Clock
) -> EncodedProgram:
    """Return the program with its functional graph, or the reason why it has none, and with its lowered forms."""
    clock.stage(f"{spec.name}: {'joint' if spec.grad else 'inference'} graph")
    functional = capture_functional_graph(forward, grad=spec.grad, count=clock.count)
    program = with_functional(program, forward, functional, root=options.source_root, strip=options.strip)
    program = without_refused(program, spec.call)
    if options.built.cuda:
        clock.stage(f"{spec.name}: lower to kernels")
    return with_lowered(program, forward, functional, options.built)


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
    refuse_launches(forward, grad=spec.grad, compiled=bool(options.built.cuda))
    return forward


def _refuse_lost_launches(program: EncodedProgram) -> None:
    """Refuse a program with kernels launched by the model that was not lowered: it runs nowhere."""
    if program.launched and not program.lowered:
        raise ExportFailed(
            f"the model launches the Triton kernel `{program.launched[0]}` itself, and {program.notes[-1]}"
        )


def _refuse_lost_backward(program: EncodedProgram, forward: ForwardCapture) -> None:
    record = program.record
    wanted = record.grad and any(getattr(value, "requires_grad", False) for value in forward.inputs)
    if wanted and record.functional is None and not record.forward.differentiable:
        names = ", ".join(f"`{name}`" for name in forward.effects.autograd_functions)
        raise ExportFailed(
            f"program `{record.name}`: the backward of the custom autograd function {names} cannot be captured: "
            f"{record.refusals[-1].reason.rstrip('.')}. Write it with torch's operators, or leave out programs with "
            "gradients (`programs=('infer',)`)"
        )
