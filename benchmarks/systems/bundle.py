"""Bundles, loaded for one of the runtime's engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.meters import Stages
from benchmarks.models import Model, by_position
from benchmarks.systems.interface import Mode, Prepared, System

_VARIANTS = {
    "mapped": {"mapped": True},
    "mapped, digests unchecked": {"mapped": True, "check_digests": False},
    "read": {},
}


def _prepare(model: Model, directory: Path, **options: Any) -> Prepared:
    import aotexport

    args, kwargs = by_position(model.inputs())
    options |= {"force": True, "dynamic_shapes": model.sizes and model.sizes()}
    stages = Stages()
    report = aotexport.export(model.module(), args, kwargs, output=directory, progress=stages.begin, **options)
    stages.end()
    notes = [
        f"{model.name}: program {program.record.name} has no {refusal.graph} graph and runs its forward graph: "
        f"{refusal.reason}"
        for program in report.programs
        for refusal in program.record.refusals
    ]
    return Prepared(stages.wall_s, notes, stages.cpu_s, stages.peak_nbytes)


def _load(model: Model, directory: Path, mode: Mode, *, target: str, **options: Any) -> Callable[..., Any]:
    import aotexport_runtime

    return aotexport_runtime.load(directory, target=target, **options).train(mode == "train")


def _load_onnx(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import torch

    import aotexport_runtime

    threads = aotexport_runtime.OnnxRuntime(threads=torch.get_num_threads())
    return aotexport_runtime.load(directory, target="onnx", onnx=threads)


def _load_openvino(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import aotexport_runtime

    return aotexport_runtime.load(directory, target="openvino")


PORTABLE = System(
    "portable",
    "a bundle, its functional graphs as operator calls of torch",
    artefact="bundle",
    prepare=_prepare,
    load=partial(_load, target="portable"),
    load_variants=_VARIANTS,
)
AUTOGRAD = System(
    "autograd",
    "a bundle, its forward graph under eager autograd",
    artefact="bundle",
    prepare=_prepare,
    load=partial(_load, target="autograd"),
    load_variants=_VARIANTS,
)
AUTO = System(
    "auto",
    "a bundle, by the graph that `load` chooses",
    artefact="bundle",
    prepare=_prepare,
    load=partial(_load, target="auto"),
)
CPU = System(
    "cpu",
    "a bundle with shared libraries for this machine's level of x86-64",
    artefact="bundle-cpu",
    prepare=partial(_prepare, targets=("portable", "cpu")),
    load=partial(_load, target="cpu", trust="native"),
)
ONNX = System(
    "onnx",
    "a bundle with ONNX models, on ONNX Runtime",
    artefact="bundle-onnx",
    prepare=partial(_prepare, onnx=True),
    load=_load_onnx,
    modes=frozenset({"infer"}),
)
OPENVINO = System(
    "openvino",
    "a bundle with ONNX models, on OpenVINO",
    artefact="bundle-onnx",
    prepare=partial(_prepare, onnx=True),
    load=_load_openvino,
    modes=frozenset({"infer"}),
)
FROZEN = System(
    "frozen",
    "a bundle with ONNX models and libraries, by the engine that is measured to be the fastest",
    artefact="bundle-serving",
    prepare=partial(_prepare, onnx=True, targets=("portable", "cpu")),
    load=partial(_load, target="auto", trust="native", frozen=True),
    modes=frozenset({"infer"}),
)
BFLOAT16 = System(
    "bfloat16",
    "the same bundle, its layers in bfloat16",
    artefact="bundle-serving",
    prepare=partial(_prepare, onnx=True, targets=("portable", "cpu")),
    load=partial(_load, target="auto", frozen="bfloat16"),
    modes=frozenset({"infer"}),
)
