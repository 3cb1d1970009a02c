"""`add_onnx`: ONNX models of a bundle's programs, from their forward graphs, beside the weights that are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

import aotexport
from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.lower.onnx.plain import plain, stored_parts
from aotexport.verify import Comparison
from aotexport.write.files import list_files, staged
from aotexport_runtime import open_bundle
from aotexport_runtime.bundle import MANIFEST_NAME, Bundle
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.observe import make_inputs
from aotexport_runtime.schema import encode_record
from aotexport_runtime.schema.manifest import Manifest, OnnxModel
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.self_test import read_vector

TARGET = "onnx"


def export_onnx(
    path: str | os.PathLike[str],
    options: OnnxOptions | None = None,
    *,
    verify: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[Manifest, list[Comparison]]:
    """Add ONNX models to the bundle at `path`, from its forward graphs, without the model's code.

    The bundle is replaced whole when all went well; else it stays as it is.

    Args:
        path: directory of a bundle.
        options: see there; None: the defaults.
        verify: compare ONNX Runtime with the recorded calls and with the forward graph.
        progress: called with the name of each stage as it begins.

    Returns:
        The new manifest, and every comparison.

    Raises:
        BundleInvalid: not a bundle, or broken.
        ExportFailed: a program has no ONNX form; names the operator or construct, with the user's line.
        ModelFileInvalid: an option is wrong, or a package is missing.
        VerificationFailed: ONNX Runtime disagrees; names the first value that differs.
    """
    options = options or OnnxOptions()
    check_options(options)
    bundle = open_bundle(path)
    with staged(Path(path), force=True) as stage:
        for entry in (*bundle.manifest.files, None):
            name = MANIFEST_NAME if entry is None else entry.path
            target = stage.joinpath(*name.split("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(bundle.root.joinpath(*name.split("/")), target)
        return add_onnx(stage, options, verify=verify, progress=progress)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def add_onnx(
    root: Path, options: OnnxOptions, *, verify: bool = True, progress: Callable[[str], None] = lambda stage: None
) -> tuple[Manifest, list[Comparison]]:
    """Write ONNX models to the bundle in directory `root`, and list them in its manifest.

    Args:
        root: directory of a bundle; written to. Models of an earlier call are replaced.
        options: see there.
        verify: compare ONNX Runtime with the recorded calls and with the forward graph.
        progress: called with the name of each stage as it begins.

    Returns:
        The new manifest, and every comparison.

    Raises:
        ExportFailed: a program has no ONNX form; names the operator or construct, with the user's line.
        ModelFileInvalid: an option is wrong, or a package is missing.
        VerificationFailed: ONNX Runtime disagrees; names the first value that differs.
    """
    check_options(options)
    bundle = open_bundle(root, check_digests=False)
    programs = choose(bundle, options)
    for model in bundle.manifest.onnx:
        (root / model.file).unlink(missing_ok=True)
        constants_file(root, model.program).unlink(missing_ok=True)
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
        from aotexport.lower.onnx.check import check_model

        written = open_bundle(root, check_digests=False)
        for program, model in zip(programs, models, strict=True):
            progress(f"{program.name}: verify in ONNX Runtime")
            comparisons += check_model(written, program, model, options)
    return manifest, comparisons


def check_options(options: OnnxOptions) -> None:
    """Refuse wrong options before anything is done.

    Raises:
        ModelFileInvalid: names the option or the missing package.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnx_ir", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelFileInvalid(f"ONNX needs {', '.join(missing)}: `pip install 'aotexport[onnx]'`")
    from aotexport.lower.onnx.translate import OPSETS

    if options.opset not in OPSETS:
        raise ModelFileInvalid(f"no operator set {options.opset}; there are {OPSETS[0]} to {OPSETS[-1]}")
    if options.state not in ("refuse", "outputs"):
        raise ModelFileInvalid(f"no way {options.state!r} for state in ONNX; there are refuse, outputs")


def choose(bundle: Bundle, options: OnnxOptions) -> list[Program]:
    """Return the programs to translate.

    Raises:
        ModelFileInvalid: an unknown name.
        ExportFailed: the bundle has no program that fits.
    """
    unknown = [name for name in options.programs if name not in bundle.program_names]
    if unknown:
        raise ModelFileInvalid(f"no program `{unknown[0]}`; the bundle has {', '.join(bundle.program_names)}")
    programs = [bundle.program(name) for name in options.programs or bundle.program_names]
    chosen = programs if options.programs else [program for program in programs if not program.grad]
    if not chosen:
        raise ExportFailed(
            f"ONNX models are forward only, and the bundle has only {', '.join(bundle.program_names)}, which record "
            "gradients. Export a program `infer` as well"
        )
    return chosen


Trace = tuple[Program, Any, Any]
"""A program in plain tensors, its graph rebuilt, and what `torch.export` makes of it."""


def _changing(bundle: Bundle, traces: Iterable[Trace]) -> frozenset[str]:
    """Return the state tensors that a call of some model changes or replaces."""
    changed: set[str] = set()
    for program, rebuilt, _ in traces:
        changed |= {*rebuilt.updates, *(rebind.name for rebind in program.rebinds)}
    return frozenset(entry.name for entry in bundle.manifest.state if entry.name in changed)


def _write_model(bundle: Bundle, trace: Trace, file: str, changing: Collection[str], options: OnnxOptions) -> OnnxModel:
    import onnx_ir as ir

    from aotexport.lower.onnx.finish import finish
    from aotexport.lower.onnx.names import check_names, input_names, output_names, update_names
    from aotexport.lower.onnx.translate import translate
    from aotexport.lower.onnx.weights import attach_constants, attach_state

    program, rebuilt, exported = trace
    model = translate(program, exported, rebuilt, opset=options.opset, translations=options.translations)
    inputs = input_names(program)
    outputs = output_names(program, inputs)
    outputs += update_names(rebuilt.updates, [*inputs, *outputs])
    outputs += check_names(len(rebuilt.checks), [*inputs, *outputs])
    entries = {name: part for entry in bundle.manifest.state for name, part in stored_parts(entry).items()}
    finish(model, inputs, outputs, reserved=entries, state=rebuilt.state)
    state_inputs = attach_state(model, rebuilt.state, entries, bundle.root, changing=changing)
    attach_constants(model, f"targets/onnx/{program.name}.safetensors", bundle.root)
    model.producer_name, model.producer_version = "aotexport", aotexport.__version__
    model.metadata_props.clear()
    model.metadata_props["aotexport.bundle"] = bundle.manifest.name
    model.metadata_props["aotexport.program"] = program.name
    model.metadata_props["aotexport.torch"] = str(torch.__version__)
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


def traced(bundle: Bundle, program: Program, options: OnnxOptions) -> Trace:
    """Return `program` in plain tensors, its graph rebuilt, and what `torch.export` makes of it.

    Raises:
        ExportFailed: it cannot be translated, or changes or aliases what the options do not allow.
    """
    from aotexport.lower.onnx.rebuild import rebuild
    from aotexport.lower.onnx.translate import capture

    if options.state == "refuse":
        _refuse_aliases(bundle, program)
    taken = plain(bundle, program)
    program, namespaces = taken.program, bundle.manifest.requirements.operator_namespaces
    rebuilt = rebuild(program, taken.graph, taken.tensors, namespaces=namespaces)
    exported = capture(program, rebuilt)
    updated = _updated(program, rebuilt, exported) if rebuilt.may_write else []
    if not updated:
        return program, rebuilt, exported
    if options.state == "refuse":
        raise _Stateful(program, f"changes {', '.join(f'`{name}`' for name in updated)}")
    _refuse_shared(bundle, program, updated)
    rebuilt = rebuild(program, taken.graph, taken.tensors, namespaces=namespaces, updated=updated)
    return program, rebuilt, capture(program, rebuilt)


class _Stateful(ExportFailed):
    def __init__(self, program: Program, what: str) -> None:
        super().__init__(
            f"program `{program.name}` {what}, and ONNX models change nothing. Give `--onnx-state=outputs` "
            "(`OnnxOptions(state='outputs')`) to have the new values as further outputs, and views as copies"
        )


def _refuse_aliases(bundle: Bundle, program: Program) -> None:
    """Refuse rebound state, and outputs that eager execution was seen to return as views of others' memory."""
    if program.rebinds:
        raise _Stateful(program, f"replaces {', '.join(f'`{rebind.name}`' for rebind in program.rebinds)}")
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        facts = bundle.record(entry.record, Vector).facts
        for name, fact in facts.items():
            path, mark, _ = name.partition(" shares memory with")
            if mark:
                raise _Stateful(program, f"returns `{path.rpartition(': ')[2]}` as a view of `{fact}`")


def _updated(program: Program, rebuilt: Any, exported: Any) -> list[str]:
    """Return the names of the state tensors and the paths of the arguments that the traced graph writes to."""
    from aotexport.lower.onnx.translate import functional

    written = functional(program, exported)
    signature = written.graph_signature
    shapes = {node.name: _shape(node.meta.get("val")) for node in written.graph.nodes}
    for result, name in {**signature.user_inputs_to_mutate, **signature.buffers_to_mutate}.items():
        placeholder = next((key for key, value in signature.inputs_to_buffers.items() if value == name), name)
        if shapes[result] != shapes[placeholder]:
            raise ExportFailed(
                f"program `{program.name}` changes values and sizes of a tensor at once, which has no ONNX "
                "form. Let it change values alone"
            )
    arguments = [spec for spec in program.inputs if not isinstance(spec, StateInput)]
    paths = {spec.path for spec in arguments}
    state = [rebuilt.state[name.rpartition(".")[2]] for name in signature.buffers_to_mutate.values()]
    order = list(signature.user_inputs)
    changed = [arguments[order.index(name)].path for name in signature.user_inputs_to_mutate.values()]
    ambiguous = [name for name in (*state, *changed) if name in rebuilt.state.values() and name in paths]
    if ambiguous:
        raise ExportFailed(
            f"program `{program.name}` changes `{ambiguous[0]}`, the name of an argument and of a state tensor, and "
            "ONNX models have one name space. Rename the argument"
        )
    return [*state, *changed]


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _refuse_shared(bundle: Bundle, program: Program, updated: Collection[str]) -> None:
    """Refuse arguments that a program writes to and that shared memory with others in the recorded calls."""
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        values = make_inputs(vector.inputs, stored, None, Environment().form).values
        tensors = {spec.path: value for spec, value in zip(vector.inputs, values, strict=True) if _is_tensor(value)}
        for path, value in tensors.items():
            if path in updated and any(other != path and _overlap(value, tensors[other]) for other in tensors):
                raise ExportFailed(
                    f"program `{program.name}` changes `{path}`, which shares memory with another argument in the "
                    "recorded call, and ONNX models know no memory. Export with arguments that share none"
                )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the ranges of memory of two tensors have a byte in common."""
    return bool(a.numel() and b.numel()) and a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: torch.Tensor) -> int:
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + span * tensor.element_size()


def _write_manifest(bundle: Bundle, root: Path, models: list[OnnxModel]) -> Manifest:
    having = {model.program for model in models}
    programs = tuple(
        msgspec.structs.replace(
            entry, targets=(*(t for t in entry.targets if t != TARGET), *((TARGET,) if entry.name in having else ()))
        )
        for entry in bundle.manifest.programs
    )
    manifest = msgspec.structs.replace(bundle.manifest, programs=programs, onnx=tuple(models), files=list_files(root))
    # A new file, not new content: this one may be a link to another bundle's.
    (root / MANIFEST_NAME).unlink()
    (root / MANIFEST_NAME).write_bytes(encode_record(manifest))
    return manifest


def constants_file(root: Path, program: str) -> Path:
    """Return where the constants of a program's model are stored, if it has large ones."""
    return root / "targets" / "onnx" / f"{program}.safetensors"
