"""Programs of the model in another dtype, for loads in it: a graph does not tell which dtypes follow the weights'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from aotexport.capture.programs.forward_graphs import ForwardGraphs
from aotexport.eager.recorded_arguments import beginning_at
from aotexport.eager.run import eager_run
from aotexport.encode.program import FORWARD_FILE, EncodedProgram, encode_program
from aotexport.errors import ExportFailed, VerificationFailed
from aotexport.model.call import example_call
from aotexport.model.cast import cast_arguments
from aotexport.model.programs import ProgramSpec
from aotexport.model.state import State
from aotexport.pipeline.bundle_draft import BundleDraft, write_bundle
from aotexport.pipeline.options import ExportOptions
from aotexport.process.clock import Clock
from aotexport.state.mode import in_mode
from aotexport.values.subclasses import CLASSES
from aotexport.vectors.record import record_vectors, write_vectors
from aotexport.vectors.small_sizes import begun_at_zero
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.results import describe_failures
from aotexport_runtime.commands.self_test import run_vector
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.schema.program import Refusal

_SERVED = "loads in {dtype} (`load(dtype=)`) run graphs captured in it"


def with_cast(
    spec: ProgramSpec, program: EncodedProgram, state: State, options: ExportOptions, clock: Clock
) -> EncodedProgram:
    """Return a program with its form for loads in the dtype of `options.autocast`, or with a note that says why not."""
    dtype = options.autocast
    if dtype is None or program.record.autocast is not None:
        return program
    clock.stage(f"{spec.name}: forward graph in {dtype}")
    try:
        with _cast(spec, state, dtype) as own:
            forward = ForwardGraphs(state).capture(own)
            with in_mode(own.call.module, own.mode, own.call.first_call_constants):
                cast = encode_program(own, forward, root=options.source_root, strip=options.strip)
    except ExportFailed as error:
        return replace(program, notes=_without(program, spec, dtype, error))
    file = f"forward.{dtype}.json"
    reason = Refusal(graph="joint" if spec.grad else "inference", reason=f"it is for loads in {dtype}")
    record = msgspec.structs.replace(
        cast.record, forward=msgspec.structs.replace(cast.record.forward, file=file), refusals=(reason,)
    )
    cast = EncodedProgram(record, {file: cast.graphs[FORWARD_FILE]})
    return replace(program, casts={dtype: cast}, notes=(*program.notes, _SERVED.format(dtype=dtype)))


def verify_casts(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Compare loads of the written bundle in another dtype with the cast model.

    Returns the draft, without sizes for which the cast model fails, and without forms that disagree with it.
    """
    programs = list(draft.programs)
    if draft.options.verify and any(program.casts for program in programs):
        # Libraries may have been dropped since it was written.
        write_bundle(draft, directory)
    for index, (spec, program) in enumerate(zip(draft.specs, draft.programs, strict=True)):
        for dtype in program.casts if draft.options.verify else ():
            clock.stage(f"{spec.name}: verify loads in {dtype}")
            try:
                programs[index] = replace(program, casts={dtype: _verified(spec, program, dtype, draft, directory)})
            except (ExportFailed, NotSupported, VerificationFailed) as error:
                programs[index] = replace(program, casts={}, notes=_without(program, spec, dtype, error))
    return replace(draft, programs=tuple(programs))


def _verified(
    spec: ProgramSpec, program: EncodedProgram, dtype: str, draft: BundleDraft, directory: Path
) -> EncodedProgram:
    cast = program.casts[dtype]
    least = {size.name: size.min for size in program.record.dimensions}
    with _cast(spec, draft.state, dtype) as own, eager_run(own.call, draft.state, own.mode, as_traced=True) as run:
        record = begun_at_zero(cast.record, own.call)
        for size in record.dimensions:
            if (low := least.get(size.name)) is not None and low > (size.min or 0):
                record = beginning_at(record, size.symbol, low)
        record, vectors, _ = record_vectors(run, record, "fast")
    bundle = CastBundle(open_bundle(directory, check_digests=False), getattr(torch, dtype))
    options = LoadOptions(
        target="autograd",
        mapped=True,
        operator_namespaces=bundle.manifest.requirements.operator_namespaces,
        tensor_types=CLASSES,
    )
    for each in vectors:
        result = run_vector(bundle, each.name, each.record, each.tensors, options)
        if not result.agrees:
            report = describe_failures(result)
            raise VerificationFailed(f"it disagreed with the cast model: {report[0].strip()}", report)
    write_vectors([replace(each, name=f"{each.name}.{dtype}") for each in vectors], directory)
    return replace(cast, record=record)


def _without(program: EncodedProgram, spec: ProgramSpec, dtype: str, error: Exception) -> tuple[str, ...]:
    """Return the notes of a program that has no form for loads in a dtype."""
    served = _SERVED.format(dtype=dtype)
    note = f"loads in {dtype} (`load(dtype=)`) run no graph of their own for `{spec.name}`: {first_line(error)}"
    return (*(each for each in program.notes if each != served), note)


@contextlib.contextmanager
def _cast(spec: ProgramSpec, state: State, dtype: str) -> Iterator[ProgramSpec]:
    """Cast parameters and floating buffers in the block, as `module.to(dtype)` does; yield the program of that."""
    call, to = spec.call, getattr(torch, dtype)
    if call.module is not None and any(isinstance(module, BundleModule) for module in call.module.modules()):
        raise ExportFailed("the model holds a loaded bundle")
    entries = (entry.tensor for entry in state.entries if entry.role != "constant")
    before = [(tensor, tensor.data) for tensor in entries if tensor.is_floating_point()]
    try:
        for tensor, data in before:
            tensor.data = data.to(to)
        args, kwargs = cast_arguments(call.args, call.kwargs, to)
        own = example_call(call.callable, args, kwargs, call.dynamic_shapes)
        own.first_call_constants, own.axes = call.first_call_constants, call.axes
        yield replace(spec, call=own)
    finally:
        for tensor, data in before:
            tensor.data = data
