"""Eager execution: the model's own code, with weights from a safetensors file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.systems.interface import Mode, Prepared, System

_WEIGHTS = "model.safetensors"


def _prepare(model: Model, directory: Path) -> Prepared:
    from safetensors.torch import save_model

    directory.mkdir(exist_ok=True)
    save_model(model.module(), str(directory / _WEIGHTS))
    return Prepared()


def _load(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    from safetensors.torch import load_model

    module = model.module()
    load_model(module, directory / _WEIGHTS)
    return module.train(mode == "train")


EAGER = System("eager", "the model's own code", artefact="weights", prepare=_prepare, load=_load, exports=False)
