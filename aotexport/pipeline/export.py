"""`export`: the whole way from a model to a bundle, in order."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from aotexport.capture.passes.dump import passes_dumped
from aotexport.capture.trace.python_operators import operators_kept
from aotexport.errors import ExportFailed
from aotexport.lower.build import compile_targets
from aotexport.lower.cpu.program import lower_programs
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.model.programs import AnyExample, Program
from aotexport.model.refusals import bugs_reported
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.pipeline.capture import capture_programs, choose_calls, with_one_row
from aotexport.pipeline.in_dtype import verify_casts
from aotexport.pipeline.onnx import add_onnx
from aotexport.pipeline.options import ExportOptions
from aotexport.pipeline.output import output_noted
from aotexport.pipeline.record import record_calls, write_calls
from aotexport.pipeline.report import complete_notes, report_of
from aotexport.pipeline.verify import check_kernels, verify_graphs, verify_libraries
from aotexport.pipeline.write import write_bundle, write_weights
from aotexport.process.blocks import deep_stack, only_export, searched_for_new_garbage, waits_short
from aotexport.process.clock import Clock, Progress
from aotexport.state.world import left_alone
from aotexport.vectors.eager_errors import EagerErrors
from aotexport.vectors.thin import thin_vectors
from aotexport.verify.comparison import Comparison
from aotexport.verify.fresh import FreshProcess
from aotexport.verify.report import ExportReport
from aotexport.write.files import list_again
from aotexport.write.weights import SHARD_NBYTES
from aotexport_runtime.bundle.staging import staged
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.values.arguments import check_type


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
    verify: bool | Literal["fast", "full"] = True,
    force: bool = False,
    strip: bool = False,
    kernel_sources: bool = True,
    autocast: torch.dtype | str | None = None,
    keep_operators: str | Iterable[str] = (),
    source_root: str | os.PathLike[str] | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    onnx: OnnxOptions | bool = False,
    allow_untested_torch: bool = False,
    dump_passes: str | os.PathLike[str] | None = None,
    progress: Progress = lambda stage: None,
) -> ExportReport:
    """Export a module or a function of tensors to a bundle.

    Args:
        model_or_fn: the module or function; left as it was, however the export ends.
        args: positional example inputs.
        kwargs: keyword example inputs.
        output: directory to write the bundle to.
        programs: names among `train`, `infer`, `eval-joint`, and descriptions of others; None: `train` and `infer` for
            a module that is in train mode or has trainable parameters, else `train` when an input requires grad, else
            `infer`.
        variants: further example calls, with other signatures than `args` and `kwargs` have: a call of the bundle runs
            the first that it fits. A tuple is positional arguments, a dict keyword arguments.
        dynamic_shapes: the sizes that may differ from the example's, in the form of `torch.export.export`.
        label_free: where the example holds labels, capture programs that record no gradients for calls without them
            too, see `with_label_free`.
        targets: forms to ship; `portable` always is. `cpu`: shared libraries for this machine's processor, `cpu:v3,v4`
            for these levels of x86-64. `cuda`: kernels for NVIDIA GPUs, `cuda:sm_80,sm_90` for those.
        verify: compare the written bundle with eager execution, in a fresh process; `fast`: in fewer calls, `full`: in
            more. The manifest says which. False: functional graphs and libraries that differ from eager stay in it.
        force: replace a bundle at `output`.
        strip: leave source lines and module paths out.
        kernel_sources: keep the sources of kernels for NVIDIA GPUs, so that the bundle can be checked without one.
        autocast: `bfloat16` or `float16`: serve calls under autocast to this dtype, on the device of the model, too.
            Programs whose code does something else then, by the dtypes of values, get a variant that is captured
            under it. Loads in this dtype (`load(dtype=)`) are served too, by graphs captured from the cast model.
        keep_operators: custom operators written in Python, by name (`library::operator`) or namespace (`library`), to
            keep as operators, whose package a load needs; others are traced through.
        source_root: directory that recorded source files are relative to; None: the working directory.
        shard_nbytes: size above which weights are split in several files.
        onnx: add ONNX models of the programs that record no gradients; options, or True for the defaults.
        allow_untested_torch: export with a release of torch that the tests were not run with.
        dump_passes: directory for the forward graph of each program as text, as traced and after each pass.
        progress: called with the name of each stage as it begins.

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
    options = ExportOptions.checked(
        output=output,
        programs=programs,
        variants=variants,
        dynamic_shapes=dynamic_shapes,
        label_free=label_free,
        targets=targets,
        verify=verify,
        force=force,
        strip=strip,
        kernel_sources=kernel_sources,
        autocast=autocast,
        keep_operators=keep_operators,
        source_root=source_root,
        shard_nbytes=shard_nbytes,
        onnx=onnx,
        allow_untested_torch=allow_untested_torch,
        dump_passes=dump_passes,
        progress=progress,
    )
    return export_as(model_or_fn, args, kwargs or {}, options)


def export_as(
    target: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: ExportOptions,
    fresh: FreshProcess | None = None,
) -> ExportReport:
    """Export as `export` does, with its keywords in one record: every stage in order.

    `capture_programs` does most of the work: program by program it captures, encodes, functionalises and lowers.
    `fresh` is the process that verifies the bundle, if it has been started.
    """
    clock = Clock(options.progress)
    borrowed = args, kwargs, options.programs, options.variants
    with (
        bugs_reported(lambda: clock.current),
        only_export(),
        waits_short(),
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
    left_out, found = list(options.left_out or ()), list[Comparison]()
    if options.onnx is not None:
        try:
            manifest, found = add_onnx(
                directory, options.onnx, verify=bool(options.verify), progress=clock.stage, left_out=left_out
            )
        except ExportFailed as error:
            if options.left_out is None:
                raise
            left_out.append(f"the bundle has no ONNX models: {error}")
            shutil.rmtree(directory / "targets" / "onnx", ignore_errors=True)
            for file in directory.glob("*.onnx"):
                file.unlink()
    files = replace(draft.target_files, notes=(*draft.target_files.notes, *left_out))
    return manifest, replace(draft, comparisons=(*draft.comparisons, *found), target_files=files)


def _compile_kernels(draft: BundleDraft, clock: Clock) -> BundleDraft:
    """Return the draft with the compiled kernels of its lowered programs."""
    options = draft.options
    if options.targets.cuda:
        clock.stage("compile kernels")
    root = None if options.strip else options.source_root
    files = compile_targets(
        draft.programs, options.targets, clock.count, kernel_sources=options.kernel_sources, root=root
    )
    return replace(draft, target_files=files)


def _compile_libraries(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Write libraries for processors below `directory`; return the draft with the targets of each program."""
    levels = draft.options.targets.cpu
    if not levels:
        return draft
    programs = lower_programs(draft.programs, levels, draft.vectors, directory, clock.stage)
    return replace(draft, programs=tuple(programs))
