"""Record calls with eager's results, and write them below the bundle's directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aotexport.capture.trace.autocast import autocast_of
from aotexport.eager.failing_example import refuse_failing_example
from aotexport.eager.run import eager_run
from aotexport.encode.program import EncodedProgram
from aotexport.errors import ExportFailed
from aotexport.lower.build import with_results_apart
from aotexport.model.programs import ProgramSpec
from aotexport.model.state import State
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.pipeline.write import write_bundle
from aotexport.process.blocks import give_back_freed_memory
from aotexport.process.clock import Clock
from aotexport.vectors.paths import checked_programs, on_path
from aotexport.vectors.record import RecordedCall, record_vectors, write_vectors
from aotexport.vectors.small_sizes import begun_at_zero
from aotexport.vectors.versions import with_versions
from aotexport.write.files import list_files
from aotexport.write.weights_as_snapshots import weights_as_snapshots
from aotexport_runtime.schema.manifest import Verification


def record_calls(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Run the model, and return the draft with the recorded calls, and with facts about its programs from these runs.

    Raises:
        ExportFailed: the model fails on its example inputs.
    """
    clock.stage("record eager results")
    programs, vectors = list[EncodedProgram](), list[RecordedCall]()
    with weights_as_snapshots(draft.state, draft.weights, directory):
        for done, (spec, program) in enumerate(zip(draft.specs, draft.programs, strict=True)):
            clock.count(done, len(draft.specs))
            program, recorded = _recorded(spec, draft.state, program, draft.options.verification)
            programs.append(with_results_apart(program))
            vectors += recorded
    give_back_freed_memory()
    return replace(draft, programs=tuple(programs), vectors=tuple(vectors))


def _recorded(
    spec: ProgramSpec, state: State, program: EncodedProgram, verification: Verification
) -> tuple[EncodedProgram, list[RecordedCall]]:
    if program.launched:
        note = (
            f"program {program.record.name} is not verified: nothing on this machine runs the Triton kernel "
            f"`{program.launched[0]}`, which the model launches itself"
        )
        return replace(program, notes=(*program.notes, note)), []
    try:
        with autocast_of(spec), eager_run(spec.call, state, program.record.mode, as_traced=True) as run:
            program = with_versions(run, program)
            is_judged = verification == "none" or program.outside
            record = program.record if is_judged else begun_at_zero(program.record, spec.call)
            checks_path = bool(checked_programs([program]))
            record, vectors, failing = record_vectors(run, record, verification, checks_path=checks_path)
    except ExportFailed:
        # Tracing accepts calls that kernels refuse: indices out of range, differing dtypes.
        refuse_failing_example(spec, state)
        raise
    return replace(program, record=record, outside={**program.outside, **failing}), vectors


def write_calls(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Write the recorded calls, without those that take another path through the code than their program's.

    Raises:
        ExportFailed: an example call, made again, takes another path.
    """
    clock.stage("write")
    draft = replace(draft, digested=list_files(directory), entries=())
    if checked := checked_programs(draft.programs):
        write_bundle(draft, directory)
        vectors, off_path = on_path(directory, checked, draft.vectors)
        draft = replace(draft, vectors=tuple(vectors), off_path=off_path)
    return replace(draft, entries=write_vectors(draft.vectors, directory))
