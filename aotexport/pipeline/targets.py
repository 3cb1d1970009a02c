"""Compile for the targets: kernels for GPUs, and libraries for processors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aotexport.lower.build import compile_targets
from aotexport.lower.cpu.program import lower_programs
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.process.clock import Clock


def compile_kernels(draft: BundleDraft, clock: Clock) -> BundleDraft:
    """Return the draft with the compiled kernels of its lowered programs."""
    options = draft.options
    if options.targets.cuda:
        clock.stage("compile kernels")
    root = None if options.strip else options.source_root
    files = compile_targets(
        draft.programs, options.targets, clock.count, kernel_sources=options.kernel_sources, root=root
    )
    return replace(draft, target_files=files)


def compile_libraries(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Write libraries for processors below `directory`; return the draft with the targets of each program."""
    levels = draft.options.targets.cpu
    if not levels:
        return draft
    programs = lower_programs(draft.programs, levels, draft.vectors, directory, clock.stage)
    return replace(draft, programs=tuple(programs))
