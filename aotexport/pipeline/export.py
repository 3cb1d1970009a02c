"""`export`: the whole way from a model to a bundle, in order."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from aotexport.capture.effects.hooks import refuse_backward_hooks
from aotexport.capture.forward import NotCaptured
from aotexport.capture.functional.capture import capture_functional_graph
from aotexport.capture.passes.dump import passes_dumped
from aotexport.capture.passes.launches import refuse_kernels_without_cpu, refuse_launches
from aotexport.capture.programs.forward_graphs import ForwardGraphs
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.python_operators import operators_kept
from aotexport.eager.failing_example import refuse_failing_example
from aotexport.eager.label_free import with_label_free
from aotexport.eager.python_state import (
    attributes_of,
    fits,
    initial_values,
    later_states,
    with_attributes,
)
from aotexport.eager.run import run_once, runs_without_gradients
from aotexport.encode.notes import Lines
from aotexport.encode.program import EncodedProgram, encode_program, with_functional
from aotexport.encode.program_notes import with_notes
from aotexport.encode.submodules import encode_submodules, settings_of
from aotexport.errors import ExportFailed
from aotexport.lower.build import TargetFiles, compile_targets, with_lowered, write_targets
from aotexport.lower.cpu.levels import Level
from aotexport.lower.lowering import lower_programs
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.lower.targets import Targets, check_targets
from aotexport.model.attributes import ChangedOnFirstCall, PythonStateChanged
from aotexport.model.left_alone import left_alone
from aotexport.model.mode import in_mode, refuse_modes_that_change_state
from aotexport.model.programs import AnyExample, Example, Program, ProgramSpec, choose_programs
from aotexport.model.state import State, collect_state
from aotexport.pipeline.onnx import add_onnx, check_options
from aotexport.process.clock import Clock, Progress
from aotexport.process.deep_stack import deep_stack
from aotexport.process.garbage import collected_rarely, give_back_freed_memory
from aotexport.vectors.eager_errors import EagerErrors
from aotexport.vectors.paths import checked_programs, on_path
from aotexport.vectors.record import Vector, record_vectors, without_vectors, write_vectors
from aotexport.vectors.small_sizes import begun_at_zero, beyond_ranges
from aotexport.vectors.versions import with_versions
from aotexport.verify.bundles import verify_bundle, verify_targets
from aotexport.verify.comparison import Comparison
from aotexport.verify.fresh import FreshProcess
from aotexport.verify.report import ExportReport
from aotexport.write.files import check_output, list_files, staged, write_manifest, write_programs
from aotexport.write.kept import kept_in_files
from aotexport.write.readme import write_readme
from aotexport.write.weights import SHARD_NBYTES, write_weights
from aotexport_runtime.bundle.notes import BundleNote, listed
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.manifest import Manifest, StateTensor, Submodule, VectorEntry
from aotexport_runtime.schema.trees import Tree
from aotexport_runtime.values.arguments import check_type, names_of, path_of


def export(
    model_or_fn: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    output: str | os.PathLike[str],
    programs: str | Program | Iterable[str | Program] | None = None,
    variants: Iterable[AnyExample] = (),
    dynamic_shapes: Any = None,
    label_free: bool = True,
    targets: str | Iterable[str] = ("portable",),
    verify: bool = True,
    force: bool = False,
    strip: bool = False,
    kernel_sources: bool = True,
    keep_operators: str | Iterable[str] = (),
    source_root: str | os.PathLike[str] | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    onnx: OnnxOptions | bool = False,
    dump_passes: str | os.PathLike[str] | None = None,
    progress: Progress = lambda stage: None,
) -> ExportReport:
    """Export a module or a function of tensors to a bundle.

    Args:
        model_or_fn: what to export; left as it was, however the export ends.
        args: positional example inputs.
        kwargs: keyword example inputs.
        output: directory to write the bundle to.
        programs: names among `train`, `infer`, `eval-joint`, and descriptions of others; None: `train` and `infer` for
            a module that is in train mode or has trainable parameters, else `train` when an input requires grad, else
            `infer`.
        variants: further example calls, with other signatures than `args` and `kwargs` have: a call of the bundle runs
            the first that it fits. A tuple is positional arguments, a dict keyword arguments.
        dynamic_shapes: which sizes may differ from the example's, as `torch.export.export` takes it.
        label_free: where the example holds labels, capture programs that record no gradients for calls without them
            too, see `with_label_free`.
        targets: forms to ship; `portable` always is. `cpu`: shared libraries for this machine's processor, `cpu:v3,v4`
            for these levels of x86-64. `cuda`: kernels for NVIDIA GPUs, `cuda:sm_80,sm_90` for those. `hip`:
            experimental, kernels for AMD GPUs, which nothing launches yet.
        verify: compare the written bundle with eager execution, in a fresh process.
        force: replace a bundle at `output`.
        strip: leave source lines and module paths out.
        kernel_sources: keep the sources of kernels for NVIDIA GPUs, so that the bundle can be checked without one.
        keep_operators: custom operators written in Python, by name (`library::operator`) or namespace (`library`), to
            keep as operators, whose package a load needs; others are traced through.
        source_root: directory that recorded source files are relative to; None: the working directory.
        shard_nbytes: size above which weights are split in several files.
        onnx: add ONNX models of the programs that record no gradients; options, or True for the defaults.
        dump_passes: directory for the forward graph of each program as text, as traced and after each pass.
        progress: called with the name of each stage as it begins.

    Returns:
        What was done.

    Raises:
        ArgumentInvalid: an argument is of a wrong type.
        ExportFailed: the model holds something that a bundle cannot; names it, with the source line.
        ModelFileInvalid: the example inputs, programs, targets or dynamic shapes are wrong.
        OutputExists: something is at `output`.
        VerificationFailed: the bundle disagrees with eager execution; nothing is left behind.
    """
    check_type("kwargs", kwargs, (Mapping, type(None)), "a dict of keyword arguments")
    check_type("shard_nbytes", shard_nbytes, int, "a number of bytes")
    check_type("onnx", onnx, (bool, OnnxOptions), "True, False or `OnnxOptions`")
    wanted = check_targets(names_of("targets", targets))
    check_output(path_of("output", output), force=force)
    options = OnnxOptions() if onnx is True else onnx or None
    if options is not None:
        check_options(options)
    clock = Clock(progress)
    with contextlib.ExitStack() as started:
        started.enter_context(left_alone(model_or_fn, (args, kwargs, programs, variants)))
        started.enter_context(operators_kept(names_of("keep_operators", keep_operators)))
        started.enter_context(passes_dumped(None if dump_passes is None else path_of("dump_passes", dump_passes)))
        clock.stage("example call")
        specs = choose_programs(model_or_fn, Example(args, kwargs or {}, dynamic_shapes), programs, variants)
        call = specs[0].call
        state = collect_state(call.module)
        for spec in specs:
            refuse_modes_that_change_state(call.module, spec.mode, state)
        root = path_of("source_root", source_root or os.getcwd()).absolute()
        started.enter_context(deep_stack())
        fresh = started.enter_context(FreshProcess()) if verify else None
        specs, notes = with_label_free(specs, state) if label_free else (specs, {})
        try:
            specs, encoded = _capture_all(specs, state, root, strip, wanted, clock)
        except ChangedOnFirstCall:
            # Libraries prepare their modules at the first call; a real one, and the next leaves the model as it is.
            run_once(call, state, specs[0].mode)
            state = collect_state(call.module)
            specs, encoded = _capture_all(specs, state, root, strip, wanted, clock)
        encoded = [replace(p, notes=(*p.notes, *notes.get(p.record.name, ()))) for p in encoded]
        call = specs[0].call
        state, attributes = initial_values(call, state)
        with staged(Path(output), force=force) as stage:
            clock.stage("write weights")
            tensors = write_weights(state, stage, shard_nbytes=shard_nbytes)
            clock.stage("record eager results")
            with kept_in_files(state, tensors, stage):
                encoded, vectors = _record(specs, state, encoded, verified=verify)
            give_back_freed_memory()
            if wanted.kernels:
                clock.stage("compile kernels")
            shared = compile_targets(
                encoded, wanted, clock.count, kernel_sources=kernel_sources, root=None if strip else root
            )
            report = _write(
                specs,
                tensors,
                attributes,
                () if strip else encode_submodules(call.module),
                encoded,
                vectors,
                shared,
                wanted.cpu,
                stage,
                fresh,
                EagerErrors(specs, state, encoded, vectors, stage),
                options,
                Lines(root, strip),
                clock,
            )
    return replace(report, path=Path(output), seconds=clock.finish())


def _capture_all(
    specs: list[ProgramSpec], state: State, root: Path, strip: bool, targets: Targets, clock: Clock
) -> tuple[list[ProgramSpec], list[EncodedProgram]]:
    """Return what was captured, with a variant per state of the module's attributes that calls leave and read."""
    known = len(state.entries)
    while True:
        capture = functools.partial(
            _capture, state=state, graphs=ForwardGraphs(state), root=root, strip=strip, targets=targets, clock=clock
        )
        try:
            return _capture_states(specs, capture, state)
        except PythonStateChanged as change:
            if set(change.names) <= set(attributes_of(specs[0].call)):
                raise
            # Tensors that traces found in these attributes are arguments from now on.
            del state.entries[known:]
            try:
                specs = [with_attributes(spec, change.names) for spec in specs]
            except ExportFailed as error:
                raise ExportFailed(f"{change}. They cannot be kept: {error}") from change


def _capture_states(
    specs: list[ProgramSpec], capture: Callable[[ProgramSpec], EncodedProgram], state: State
) -> tuple[list[ProgramSpec], list[EncodedProgram]]:
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
            note = f"calls of program `{spec.variant_of}` must pass {_quoted(spec.without)}: {first_line(error)}"
            encoded[index] = replace(encoded[index], notes=(*encoded[index].notes, note))
    for spec in [spec for spec in captured if attributes_of(spec.call)]:
        main = spec.variant_of or spec.name
        for later in later_states(spec, state):
            own = [program.record for program in encoded if main in (program.record.name, program.variant_of)]
            if any(fits(record, later.call) for record in own):
                continue
            captured.append(replace(later, name=f"{main}.{len(own) + 1}", variant_of=main, without=()))
            encoded.append(capture(captured[-1]))
    return captured, encoded


@collected_rarely()
def _capture(
    spec: ProgramSpec,
    *,
    state: State,
    graphs: ForwardGraphs,
    root: Path,
    strip: bool,
    targets: Targets,
    clock: Clock,
) -> EncodedProgram:
    if spec.grad:
        refuse_backward_hooks(spec.call.module)
    clock.stage(f"{spec.name}: forward graph")
    try:
        forward = graphs.capture(spec)
    except NotCaptured:
        refuse_failing_example(spec, state)
        raise
    refuse_kernels_without_cpu(forward)
    refuse_launches(forward, grad=spec.grad, compiled=bool(targets.cuda))
    with in_mode(spec.call.module, spec.mode, spec.call.settled):
        if forward.effects.takes_gradients and not runs_without_gradients(spec.call, state):
            spec = replace(spec, grad=True)
            forward.effects.reads.add("grad_mode")
        program = encode_program(spec, forward, root=root, strip=strip)
        clock.stage(f"{spec.name}: {'joint' if spec.grad else 'inference'} graph")
        functional = capture_functional_graph(forward, grad=spec.grad)
    program = with_functional(program, forward, functional, root=root, strip=strip)
    _refuse_lost_backward(program, forward)
    if targets.kernels:
        clock.stage(f"{spec.name}: lower to kernels")
    program = with_lowered(program, forward, functional, targets)
    _refuse_lost_launches(program)
    if not spec.without:
        return program
    note = f"calls of program `{spec.variant_of}` may leave out {_quoted(spec.without)}: `{spec.name}` serves them"
    return replace(program, notes=(*program.notes, note))


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _refuse_lost_launches(program: EncodedProgram) -> None:
    """Refuse a program of kernels that the model launches itself, and that was not lowered: it runs nowhere."""
    if program.launched and not program.lowered:
        raise ExportFailed(
            f"the model launches the Triton kernel `{program.launched[0]}` itself, and {program.notes[-1]}"
        )


def _record(
    specs: Sequence[ProgramSpec], state: State, encoded: Sequence[EncodedProgram], *, verified: bool
) -> tuple[list[EncodedProgram], list[Vector]]:
    """Run the model, and return the programs with what was seen, and the recorded calls."""
    programs: list[EncodedProgram] = []
    vectors: list[Vector] = []
    for spec, program in zip(specs, encoded, strict=True):
        if program.launched:
            note = (
                f"program {program.record.name} is not verified: nothing on this machine runs the Triton kernel "
                f"`{program.launched[0]}`, which the model launches itself"
            )
            programs.append(replace(program, notes=(*program.notes, note)))
            continue
        try:
            program = with_versions(spec.call, state, program)
        except Exception:
            # Tracing is more lenient than the kernels: of indices that are out of range, of dtypes that differ.
            refuse_failing_example(spec, state)
            raise
        record = begun_at_zero(program.record, spec.call) if verified else program.record
        record, recorded = record_vectors(spec.call, state, record)
        programs.append(replace(program, record=record))
        vectors += recorded
    return programs, vectors


def _refuse_lost_backward(program: EncodedProgram, forward: ForwardCapture) -> None:
    """Refuse a program whose gradients no graph holds."""
    record = program.record
    wanted = record.grad and any(getattr(value, "requires_grad", False) for value in forward.inputs)
    if wanted and record.functional is None and not record.forward.differentiable:
        names = ", ".join(f"`{name}`" for name in forward.effects.autograd_functions)
        raise ExportFailed(
            f"program `{record.name}`: the backward of the custom autograd function {names} cannot be captured: "
            f"{record.refusals[-1].reason}. Write it with torch's operators, or leave out programs with gradients "
            "(`programs=('infer',)`)"
        )


def _write(
    specs: Sequence[ProgramSpec],
    tensors: tuple[StateTensor, ...],
    attributes: dict[str, Tree],
    modules: tuple[Submodule, ...],
    programs: list[EncodedProgram],
    vectors: list[Vector],
    shared: TargetFiles,
    levels: Sequence[Level],
    stage: Path,
    fresh: FreshProcess | None,
    eager: EagerErrors,
    onnx: OnnxOptions | None,
    lines: Lines,
    clock: Clock,
) -> ExportReport:
    comparisons: list[Comparison] = []
    call, off_path = specs[0].call, dict[str, list[str]]()
    name = call.name if call.module is None else type(call.module).__name__
    clock.stage("write")
    weights = list_files(stage)
    records: tuple[VectorEntry, ...] = ()

    def finish(current: list[EncodedProgram]) -> Manifest:
        write_programs(current, stage)
        write_targets(current, shared, stage)
        write_readme(stage, name, current)
        return write_manifest(
            stage,
            name=name,
            kind="module" if call.module is not None else "function",
            training=call.module is not None and _starts_in_training(call.module, current),
            programs=current,
            state=tensors,
            attributes=attributes,
            modules=modules,
            settings=settings_of(call.module),
            vectors=records,
            known=weights,
        )

    if checked := checked_programs(programs):
        finish(programs)
        vectors, off_path = on_path(stage, checked, vectors)
    records = write_vectors(vectors, stage)
    if fresh is not None:
        clock.stage("verify in a fresh process")
        programs, comparisons = verify_bundle(stage, programs, finish, fresh, eager)
        refused = beyond_ranges(stage, programs)
        vectors = [vector for vector in vectors if (vector.record.program, vector.name) not in refused]
        records = without_vectors(records, refused, stage)
    if levels:
        programs = lower_programs(programs, levels, vectors, stage, clock.stage)
        if fresh is not None:
            clock.stage("verify the compiled programs")
            programs, compared = verify_targets(stage, programs, levels, finish, eager)
            comparisons += compared
    calls = {spec.name: spec.call for spec in specs}
    programs = [
        with_notes(p, calls[p.record.name], off_path.get(p.record.name, ()), eager.notes.get(p.record.name), lines)
        for p in programs
    ]
    manifest = finish(programs)
    if onnx is not None:
        manifest, found = add_onnx(stage, onnx, verify=fresh is not None, progress=clock.stage)
        comparisons = [*comparisons, *found]
    notes = listed(manifest, [program.record for program in programs])
    notes += [BundleNote("other", (), text) for text in shared.notes]
    return ExportReport(stage, manifest, programs, comparisons, notes=notes)


def _starts_in_training(module: nn.Module, programs: list[EncodedProgram]) -> bool:
    modes = {program.record.mode for program in programs}
    return module.training if {"train", "eval"} <= modes else "train" in modes
