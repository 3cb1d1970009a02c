"""`export`: the whole way from a model to a bundle, in order."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from aotexport.capture.passes.order import passes_dumped
from aotexport.capture.trace.python_operators import operators_kept
from aotexport.errors import ExportFailed
from aotexport.lower.build import compile_targets
from aotexport.lower.cpu.program import lower_programs
from aotexport.lower.targets import OnnxOptions
from aotexport.model.refusals import bugs_reported
from aotexport.pipeline.bundle_draft import BundleDraft, write_bundle, write_weights
from aotexport.pipeline.capture import capture_programs, choose_calls, with_one_row
from aotexport.pipeline.in_dtype import verify_casts
from aotexport.pipeline.onnx import add_onnx
from aotexport.pipeline.options import ExportOptions
from aotexport.pipeline.report import complete_notes, output_noted, report_of
from aotexport.pipeline.verify import check_kernels, record_calls, verify_graphs, verify_libraries, write_calls
from aotexport.process.blocks import deep_stack, only_export, searched_for_new_garbage
from aotexport.process.clock import Clock
from aotexport.state.world import left_alone
from aotexport.vectors.eager_errors import EagerErrors
from aotexport.vectors.thin import thin_vectors
from aotexport.verify.comparisons import Comparison
from aotexport.verify.fresh import FreshProcess
from aotexport.verify.report import ExportReport
from aotexport.write.files import list_again
from aotexport_runtime.bundle.staging import staged
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.values.arguments import check_type, keywords_of


@keywords_of(ExportOptions)
def export(
    model_or_fn: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    options: ExportOptions,
) -> ExportReport:
    """Export a module or a function of tensors to a bundle.

    Args:
        model_or_fn: the module or function; left as it was, however the export ends.
        args: positional example inputs.
        kwargs: keyword example inputs.
        options: as keywords, see below.

    Returns:
        The written bundle, its programs and the comparisons with eager execution.

    Raises:
        ArgumentInvalid: an argument is of a wrong type.
        ExportFailed: the model holds something that a bundle cannot; names it, with the source line.
        InternalError: aotexport has a bug; nothing is left behind.
        ModelFileInvalid: the example inputs, programs, targets or dynamic shapes are wrong.
        OutputExists: something is at `output`.
        VerificationFailed: the bundle disagrees with eager execution; nothing is left behind.
    """
    check_type("kwargs", kwargs, (Mapping, type(None)), "a dict of keyword arguments")
    return export_as(model_or_fn, args, kwargs or {}, options)


def export_as(
    target: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: ExportOptions,
    fresh: FreshProcess | None = None,
) -> ExportReport:
    """Export as `export` does: every stage in order.

    `capture_programs` does most of the work: program by program it captures, encodes, functionalises and lowers.
    `fresh` is the process that verifies the bundle, if it has been started.
    """
    clock = Clock(options.progress)
    borrowed = args, kwargs, options.programs, options.variants
    with (
        bugs_reported(lambda: clock.current),
        only_export(),
        searched_for_new_garbage(),
        left_alone(target, borrowed),
        operators_kept(options.keep_operators),
        passes_dumped(options.dump_passes),
        deep_stack(),
        output_noted() as outputs,
    ):
        specs, state = choose_calls(target, args, kwargs, options, clock)
        with (fresh or FreshProcess()) if options.verify else contextlib.nullcontext() as fresh:
            draft = capture_programs(specs, state, options, clock)
            with staged(options.output, force=options.force) as directory:
                draft, eager = _verified(draft, directory, fresh, clock)
                further = with_one_row(draft, state, directory, clock) if options.verify else draft
                if len(further.specs) > len(draft.specs):
                    for path in directory.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                    with FreshProcess() as again:
                        further, eager = _verified(further, directory, again, clock)
                draft = further
                draft = _compile_libraries(draft, directory, clock)
                draft = verify_libraries(draft, directory, eager, clock)
                draft = verify_casts(draft, directory, clock)
                draft = complete_notes(draft, outputs())
                manifest = write_bundle(draft, directory)
                check_kernels(draft, directory)
                manifest, draft = _with_onnx(draft, manifest, directory, clock)
                thinned = thin_vectors(directory, manifest)
                if thinned is not manifest:
                    manifest = list_again(directory, thinned)
    clock.end()
    return report_of(draft, manifest, clock.seconds)


def _verified(
    draft: BundleDraft, directory: Path, fresh: FreshProcess | None, clock: Clock
) -> tuple[BundleDraft, EagerErrors]:
    """Return the draft as it was written, recorded and verified, with what judges its differences."""
    draft = write_weights(draft, directory, clock)
    draft = record_calls(draft, directory, clock)
    draft = _compile_kernels(draft, clock)
    draft = write_calls(draft, directory, clock)
    eager = EagerErrors(draft.specs, draft.state, draft.programs, draft.vectors, directory)
    return verify_graphs(draft, directory, fresh, eager, clock), eager


def _with_onnx(draft: BundleDraft, manifest: Manifest, directory: Path, clock: Clock) -> tuple[Manifest, BundleDraft]:
    """Write the ONNX models that the options ask for; return the manifest, and the draft with their comparisons."""
    options = draft.options
    left_out, found = list(options.left_out), list[Comparison]()
    if isinstance(options.onnx, OnnxOptions):
        try:
            manifest, found = add_onnx(
                directory,
                options.onnx,
                verify=bool(options.verify),
                # Beside its model, weights would be inputs of the others.
                step=not options.serving,
                progress=clock.stage,
                left_out=left_out,
            )
        except ExportFailed as error:
            if not options.serving:
                raise
            left_out.append(f"the bundle has no ONNX models: {error}")
            for file in directory.glob("*.onnx"):
                file.unlink()
    files = replace(draft.target_files, notes=(*draft.target_files.notes, *left_out))
    return manifest, replace(draft, comparisons=(*draft.comparisons, *found), target_files=files)


def _compile_kernels(draft: BundleDraft, clock: Clock) -> BundleDraft:
    options = draft.options
    if options.built.cuda:
        clock.stage("compile kernels")
    root = None if options.strip else options.source_root
    return replace(draft, target_files=compile_targets(draft.programs, options.built, clock.count, root=root))


def _compile_libraries(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Write libraries for processors below `directory`; return the draft with the targets of each program."""
    levels = draft.options.built.cpu
    if not levels:
        return draft
    programs = lower_programs(draft.programs, levels, draft.vectors, directory, clock.stage)
    return replace(draft, programs=tuple(programs))
