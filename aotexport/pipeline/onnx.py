"""Add ONNX models of a bundle's programs, made from their forward graphs, beside the stored weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

import aotexport
from aotexport.errors import ExportFailed, ModelFileInvalid, VerificationFailed
from aotexport.lower.onnx.plain import stored_parts
from aotexport.lower.targets import OnnxOptions, check_options
from aotexport.model.refusals import bugs_reported
from aotexport.verify.comparisons import Comparison
from aotexport.write.files import list_again
from aotexport_runtime import open_bundle
from aotexport_runtime.bundle.directory import MANIFEST_NAME
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.staging import link, staged
from aotexport_runtime.commands.saving import copy_files
from aotexport_runtime.engines.onnx.session import WRITTEN_OVER
from aotexport_runtime.schema.manifest import Manifest, OnnxModel, step_program
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.values.trees import arrays_in

if TYPE_CHECKING:
    from aotexport.lower.onnx.translate import Trace

TARGET = "onnx"


def export_onnx(
    path: str | os.PathLike[str],
    options: OnnxOptions | None = None,
    *,
    verify: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[Manifest, list[Comparison]]:
    """Add ONNX models to the bundle at `path`, from its forward graphs, without the model's code.

    The bundle is replaced whole on success; else it stays as it is.

    Args:
        path: directory of a bundle.
        options: see there; None: the defaults.
        verify: compare ONNX Runtime with the recorded calls.
        progress: called with the name of each stage as it begins.

    Returns:
        The new manifest, and every comparison.

    Raises:
        BundleInvalid: not a bundle, or broken.
        ExportFailed: a program has no ONNX form; names the operator or construct, with the user's line.
        InternalError: aotexport has a bug; the bundle is as it was.
        ModelFileInvalid: an option is wrong, or a package is missing.
        VerificationFailed: ONNX Runtime disagrees.
    """
    options = options or OnnxOptions()
    check_options(options)
    bundle = open_bundle(path)
    with bugs_reported(lambda: "ONNX"), staged(Path(path), force=True) as stage:
        copy_files(bundle, bundle.manifest.files, set(), stage)
        link(bundle.directory.files / MANIFEST_NAME, stage / MANIFEST_NAME)
        return add_onnx(stage, options, verify=verify, progress=progress)


def add_onnx(
    root: Path,
    options: OnnxOptions,
    *,
    verify: bool = True,
    step: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
    left_out: list[str] | None = None,
) -> tuple[Manifest, list[Comparison]]:
    """Write ONNX models to the bundle in directory `root`, in place of earlier ones; return manifest and comparisons.

    `step`: take the whole training step too, where the options name no programs.
    `left_out` takes a sentence per model that disagrees, which is then left out; None: that is an error. Raises what
    `export_onnx` does.
    """
    from aotexport.lower.onnx.translate import traced

    bundle = open_bundle(root, check_digests=False)
    programs = choose(bundle, options, step=step)
    for model in bundle.manifest.onnx:
        (root / model.file).unlink(missing_ok=True)
    traces: list[Trace] = []
    for program in programs:
        progress(f"{program.name}: ONNX graph")
        traces.append(traced(bundle, program, options))
    changing = _changing(bundle, traces)
    models: list[OnnxModel] = []
    for trace in traces:
        progress(f"{trace[0].name}: ONNX model")
        name = "model.onnx" if not models else f"model.{trace[0].name}.onnx"
        models.append(_write_model(bundle, trace, name, changing, options))
    manifest = _write_manifest(bundle, root, models)
    comparisons: list[Comparison] = []
    if verify:
        from aotexport.verify.onnx.check import check_model

        written = open_bundle(root, check_digests=False)
        for program, model in zip(programs, tuple(models), strict=True):
            progress(f"{program.name}: verify in ONNX Runtime")
            try:
                comparisons += check_model(written, program, model)
            except VerificationFailed as error:
                if left_out is None:
                    raise
                first, *rest = [line.strip() for line in str(error).splitlines()]
                reason = "; ".join(dict.fromkeys((rest[0], rest[-1]))) if rest else first
                left_out.append(f"program {program.name} has no ONNX model: {reason}")
                (root / model.file).unlink()
                models.remove(model)
        if len(models) < len(manifest.onnx):
            manifest = _write_manifest(bundle, root, models)
        # Recorded calls have got errors of float32.
        manifest = list_again(root, manifest)
    return manifest, comparisons


def choose(bundle: Bundle, options: OnnxOptions, *, step: bool) -> list[Program]:
    """Return the programs to translate; `ModelFileInvalid`: an unknown name; `ExportFailed`: none fits."""
    unknown = [name for name in options.programs if name not in bundle.program_names]
    if unknown:
        raise ModelFileInvalid(f"no program `{unknown[0]}`; the bundle has {', '.join(bundle.program_names)}")
    programs = [bundle.program(name) for name in options.programs or bundle.program_names]
    left = None if step else step_program(bundle.manifest)
    chosen = programs if options.programs else [each for each in programs if not each.grad and each.name != left]
    chosen = [program for program in chosen if program.autocast is None] or chosen
    if not chosen:
        raise ExportFailed(
            f"ONNX models are forward only, and the bundle has only {', '.join(bundle.program_names)}, which record "
            "gradients. Export a program `infer` as well"
        )
    for program in chosen:
        if arrays_in([*(parameter.tree for parameter in program.parameters), program.output_tree]):
            raise ExportFailed(
                f"program `{program.name}` takes or returns arrays of NumPy, and ONNX models are made of programs of "
                "tensors. Take and return tensors; an ONNX model takes arrays for them"
            )
    return chosen


def _changing(bundle: Bundle, traces: Iterable[Trace]) -> frozenset[str]:
    """Return the state tensors that a call of some model changes or replaces."""
    changed: set[str] = set()
    for program, rebuilt, _ in traces:
        changed |= {*rebuilt.updates, *(rebind.name for rebind in program.rebinds)}
    return frozenset(entry.name for entry in bundle.manifest.state if entry.name in changed)


def _write_model(bundle: Bundle, trace: Trace, file: str, changing: Collection[str], options: OnnxOptions) -> OnnxModel:
    import onnx_ir as ir

    from aotexport.lower.onnx.in_place import written_over
    from aotexport.lower.onnx.translate import translate
    from aotexport.lower.onnx.weights import attach_state, finish, names_of

    program, rebuilt, exported = trace
    model = translate(program, exported, rebuilt, opset=options.opset, translations=options.translations)
    inputs, outputs = names_of(program, rebuilt.updates, len(rebuilt.checks))
    entries = {name: part for entry in bundle.manifest.state for name, part in stored_parts(entry).items()}
    finish(model, inputs, outputs, reserved=entries, state=rebuilt.state)
    state_inputs = attach_state(model, rebuilt.state, entries, bundle.root, changing=changing)
    model.producer_name, model.producer_version = "aotexport", aotexport.__version__
    model.metadata_props.clear()
    model.metadata_props["aotexport.bundle"] = bundle.manifest.name
    model.metadata_props["aotexport.program"] = program.name
    model.metadata_props["aotexport.torch"] = str(torch.__version__)
    if program.name == step_program(bundle.manifest) and not rebuilt.checks:
        paths = (spec.path for spec in program.inputs if not isinstance(spec, StateInput))
        names = {**dict(zip(paths, inputs, strict=True)), **state_inputs}
        new = dict(zip(rebuilt.updates, model.graph.outputs[len(program.outputs) :], strict=True))
        model.metadata_props[WRITTEN_OVER] = "\n".join(written_over(model, new, names))
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    (bundle.root / file).write_bytes(data)
    return OnnxModel(
        program=program.name,
        file=file,
        opset=options.opset,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        updates=rebuilt.updates,
        state_inputs=state_inputs,
        checks=rebuilt.checks,
    )


def _write_manifest(bundle: Bundle, root: Path, models: list[OnnxModel]) -> Manifest:
    having = {model.program for model in models}
    programs = tuple(
        msgspec.structs.replace(
            entry, targets=(*(t for t in entry.targets if t != TARGET), *((TARGET,) if entry.name in having else ()))
        )
        for entry in bundle.manifest.programs
    )
    return list_again(root, msgspec.structs.replace(bundle.manifest, programs=programs, onnx=tuple(models), files=()))
