"""AOTInductor: a package of machine code and weights, for inference."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.systems.interface import Mode, Prepared, System
from benchmarks.systems.torch_compile import keep_caches
from benchmarks.systems.torch_export import exported

_PACKAGE = "model.pt2"


def _prepare(model: Model, directory: Path) -> Prepared:
    import torch

    directory.mkdir(exist_ok=True)
    keep_caches(directory)
    with torch.no_grad():
        _inductor().aoti_compile_and_package(exported(model, "infer"), package_path=str(directory / _PACKAGE))
    return Prepared()


def _load(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    if model.classes:
        importlib.import_module(model.classes)
    return _inductor().aoti_load_package(str(directory / _PACKAGE))


def _inductor() -> Any:
    """Return the module that the documentation of AOTInductor names."""
    return importlib.import_module("torch._inductor")


AOT_INDUCTOR = System(
    "AOTInductor",
    "a package of AOTInductor, built for this machine",
    artefact="package",
    prepare=_prepare,
    load=_load,
    modes=frozenset({"infer"}),
)
