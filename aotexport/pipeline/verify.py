"""Record calls with eager's results, and compare the written bundle with them: its graphs, then its libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from aotexport.capture.trace.autocast import autocast_of
from aotexport.eager.run import eager_run, refuse_failing_example
from aotexport.encode.program import EncodedProgram
from aotexport.errors import ExportFailed
from aotexport.lower.build import CUDA, with_results_apart
from aotexport.model.programs import ProgramSpec
from aotexport.model.refusals import internal_error
from aotexport.model.state import State
from aotexport.pipeline.bundle_draft import BundleDraft, write_bundle
from aotexport.process.clock import Clock
from aotexport.vectors.eager_errors import EagerErrors
from aotexport.vectors.record import (
    RecordedCall,
    checked_programs,
    on_path,
    record_vectors,
    without_vectors,
    write_vectors,
)
from aotexport.vectors.small_sizes import begun_at_zero, beyond_ranges
from aotexport.vectors.versions import with_versions
from aotexport.verify.bundles import verify_bundle, verify_targets
from aotexport.verify.fresh import FreshProcess
from aotexport.write.files import list_files
from aotexport.write.weights import weights_as_snapshots
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.execution.allocator import give_back_freed_memory
from aotexport_runtime.schema.manifest import Manifest, Verification


def verify_graphs(
    draft: BundleDraft, directory: Path, fresh: FreshProcess | None, eager: EagerErrors, clock: Clock
) -> BundleDraft:
    """Return the draft without the functional graphs, the sizes and the recorded calls that disagree.

    `fresh` is the process that runs the bundle; None: nothing is verified. A forward graph must agree
    (`VerificationFailed`).
    """
    if fresh is None:
        return draft
    clock.stage("verify in a fresh process")
    programs, found = verify_bundle(directory, draft.programs, _rewrite(draft, directory), fresh, eager)
    refused = beyond_ranges(directory, programs)
    return replace(
        draft,
        programs=tuple(programs),
        vectors=tuple(each for each in draft.vectors if (each.record.program, each.name) not in refused),
        entries=without_vectors(draft.entries, refused, directory),
        comparisons=tuple(found),
        judged=dict(eager.notes),
    )


def verify_libraries(draft: BundleDraft, directory: Path, eager: EagerErrors, clock: Clock) -> BundleDraft:
    """Return the draft without the compiled programs that disagree with eager execution."""
    levels = draft.options.built.cpu
    if not levels or not draft.options.verify:
        return draft
    clock.stage("verify the compiled programs")
    rewrite = _rewrite(draft, directory)
    programs, found = verify_targets(directory, draft.programs, levels, rewrite, eager)
    comparisons = (*draft.comparisons, *found)
    return replace(draft, programs=tuple(programs), comparisons=comparisons, judged=dict(eager.notes))


def check_kernels(draft: BundleDraft, directory: Path) -> None:
    """Read the graphs that launch kernels as a machine with a GPU reads them: nothing here runs them."""
    if not draft.options.built.cuda:
        return
    bundle = open_bundle(directory, check_digests=False)
    try:
        for name in bundle.program_names:
            if bundle.has_target(CUDA, name):
                for backward in (False, True)[: 1 if bundle.lowered(CUDA, name).backward is None else 2]:
                    bundle.lowered_graph(CUDA, name, backward=backward)
    except BundleInvalid as error:
        raise internal_error("lower to kernels", error) from error


def _rewrite(draft: BundleDraft, directory: Path) -> Callable[[Sequence[EncodedProgram]], Manifest]:
    return lambda programs: write_bundle(replace(draft, programs=tuple(programs)), directory)


def record_calls(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Run the model; return the draft with the recorded calls, and with facts about its programs from these runs."""
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

    `ExportFailed`: an example call, made again, takes another path.
    """
    clock.stage("write")
    draft = replace(draft, digested=list_files(directory), entries=())
    if checked := checked_programs(draft.programs):
        write_bundle(draft, directory)
        vectors, off_path = on_path(directory, checked, draft.vectors)
        draft = replace(draft, vectors=tuple(vectors), off_path=off_path)
    return replace(draft, entries=write_vectors(draft.vectors, directory))
