"""Bundles, loaded for one of the runtime's engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.systems.interface import Mode, Prepared, System

_VARIANTS = {"mapped": {}, "mapped, digests unchecked": {"check_digests": False}, "read": {"mapped": False}}


def _prepare(model: Model, directory: Path) -> Prepared:
    import aotexport

    inputs = model.inputs()
    args, kwargs = (inputs, None) if isinstance(inputs, tuple) else ((), dict(inputs))
    report = aotexport.export(model.module(), args, kwargs, output=directory, force=True)
    notes = [
        f"{model.name}: program {program.record.name} has no {refusal.graph} graph and runs its forward graph: "
        f"{refusal.reason}"
        for program in report.programs
        for refusal in program.record.refusals
    ]
    return Prepared(report.seconds, notes)


def _load(model: Model, directory: Path, mode: Mode, *, target: str, **options: Any) -> Callable[..., Any]:
    import aotexport_runtime

    return aotexport_runtime.load(directory, target=target, **options).train(mode == "train")


def _engine(target: str, summary: str) -> System:
    load = partial(_load, target=target)
    return System(target, summary, artefact="bundle", prepare=_prepare, load=load, load_variants=_VARIANTS)


PORTABLE = _engine("portable", "a bundle, its functional graphs as operator calls of torch")
AUTOGRAD = _engine("autograd", "a bundle, its forward graph under eager autograd")
