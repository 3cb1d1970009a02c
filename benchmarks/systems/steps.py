"""Whole training steps with AdamW: eager's with the fused operator, and bundles with a program `step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import Model
from benchmarks.systems.bundle import AUTO, CPU
from benchmarks.systems.eager import EAGER
from benchmarks.systems.interface import Mode, Prepared, System

if TYPE_CHECKING:
    from torch import nn


def _with_loss(model: Model) -> nn.Module:
    from torch import nn

    class WithLoss(nn.Module):
        """The model, which returns its loss alone."""

        def __init__(self) -> None:
            super().__init__()
            self.network = model.module()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return model.loss(self.network(*args, **kwargs))

    return WithLoss()


def _prepare(model: Model, directory: Path, *, like: System) -> Prepared:
    prepare: Any = like.prepare
    return prepare(
        replace(model, module=partial(_with_loss, model), sizes=None),
        directory,
        step="adamw:lr=1e-05",
        programs=("train",),
        verify="fast",
    )


def _load(model: Model, directory: Path, mode: Mode, *, like: System) -> Callable[..., Any]:
    assert like.load is not None
    module: Any = like.load(model, directory, "train")
    return module.stepper()


FUSED = replace(EAGER, name="fused", summary="the model's own code, and AdamW(fused=True)", modes=frozenset({"step"}))


def _stepping(name: str, how: str, like: System) -> System:
    return System(
        name,
        f"a bundle with a program `step`, {how}",
        artefact=f"{like.artefact}-step",
        prepare=partial(_prepare, like=like),
        load=partial(_load, like=like),
        modes=frozenset({"step"}),
    )


STEP = _stepping("step", "as operator calls of torch", AUTO)
STEP_CPU = _stepping("step by library", "as a shared library", CPU)
