"""Compare the written bundle with eager execution: its graphs, then its libraries for processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from aotexport.encode.program import EncodedProgram
from aotexport.lower.build import CUDA
from aotexport.model.refusals import internal_error
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.pipeline.write import write_bundle
from aotexport.process.clock import Clock
from aotexport.vectors.eager_errors import EagerErrors
from aotexport.vectors.record import without_vectors
from aotexport.vectors.small_sizes import beyond_ranges
from aotexport.verify.bundles import verify_bundle, verify_targets
from aotexport.verify.fresh import FreshProcess
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.manifest import Manifest


def verify_graphs(
    draft: BundleDraft, directory: Path, fresh: FreshProcess | None, eager: EagerErrors, clock: Clock
) -> BundleDraft:
    """Return the draft without the functional graphs, the sizes and the recorded calls that disagree.

    Args:
        draft: the draft to be written.
        directory: of the bundle, with weights and recorded calls.
        fresh: the process that runs the bundle; None: nothing is verified.
        eager: judges differences by eager's own errors.
        clock: times the stages.

    Raises:
        VerificationFailed: a forward graph disagrees with eager execution.
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
    levels = draft.options.targets.cpu
    if not levels or not draft.options.verify:
        return draft
    clock.stage("verify the compiled programs")
    rewrite = _rewrite(draft, directory)
    programs, found = verify_targets(directory, draft.programs, levels, rewrite, eager)
    comparisons = (*draft.comparisons, *found)
    return replace(draft, programs=tuple(programs), comparisons=comparisons, judged=dict(eager.notes))


def check_kernels(draft: BundleDraft, directory: Path) -> None:
    """Read the graphs that launch kernels as a machine with a GPU reads them: nothing here runs them.

    Raises:
        InternalError: a loader would refuse them.
    """
    if not draft.options.targets.cuda:
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
    """Return a function that rewrites the bundle with other programs."""
    return lambda programs: write_bundle(replace(draft, programs=tuple(programs)), directory)
