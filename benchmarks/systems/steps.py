"""Whole training steps with AdamW: eager's with the fused operator, and bundles with a program `step`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import Model
from benchmarks.systems.bundle import AUTO, CPU, ONNX
from benchmarks.systems.eager import EAGER
from benchmarks.systems.interface import Mode, Prepared, System

if TYPE_CHECKING:
    from torch import nn


def _with_loss(model: Model) -> nn.Module:
    from torch import nn

    class WithLoss(nn.Module):
        """The model, called as ever, which returns its loss alone."""

        def __init__(self) -> None:
            super().__init__()
            self.network = model.module()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return model.loss(self.network(*args, **kwargs))

    found = WithLoss()
    WithLoss.forward.__signature__ = inspect.signature(type(found.network).forward)  # type: ignore[attr-defined]
    return found


def _prepare(model: Model, directory: Path, *, like: System, **options: Any) -> Prepared:
    prepare: Any = like.prepare
    return prepare(
        replace(model, module=partial(_with_loss, model), sizes=None),
        directory,
        step="adamw:lr=1e-05",
        programs=("train",),
        verify="fast",
        **options,
    )


def _load(model: Model, directory: Path, mode: Mode, *, like: System) -> Callable[..., Any]:
    assert like.load is not None
    module: Any = like.load(model, directory, "train")
    return module.stepper()


def _prepare_onnx(model: Model, directory: Path) -> Prepared:
    from aotexport import OnnxOptions

    return _prepare(model, directory, like=AUTO, onnx=OnnxOptions(programs=("step",)))


def _of_arrays(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of tensors, by one of arrays."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        arrays = [each.numpy() for each in args], {name: each.numpy() for name, each in kwargs.items()}
        return torch.as_tensor(step(*arrays[0], **arrays[1]))

    return call


def _load_onnx(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    assert ONNX.load is not None
    module: Any = ONNX.load(model, directory, "train")
    return _of_arrays(module.stepper())


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
STEP_ONNX = replace(
    STEP, name="step by ONNX Runtime", artefact="bundle-onnx-step", prepare=_prepare_onnx, load=_load_onnx
)
