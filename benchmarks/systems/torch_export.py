"""`torch.export`: the yardstick for what an export may cost, and the module that it gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import Model, by_position
from benchmarks.systems.interface import Mode, Prepared, System


def exported(model: Model, mode: Mode) -> Any:
    """Return the exported program of a mode."""
    from torch.export import export

    args, kwargs = by_position(model.inputs())
    sizes = model.sizes and model.sizes()
    return export(model.module().train(mode == "train"), args, kwargs, dynamic_shapes=sizes)


def _prepare(model: Model, directory: Path) -> Prepared:
    exported(model, "train")
    return Prepared()


TORCH_EXPORT = System(
    "torch.export", "torch.export.export, in the suite `export` alone", artefact="program", prepare=_prepare
)


def _prepare_module(model: Model, directory: Path) -> Prepared:
    import torch

    directory.mkdir(exist_ok=True)
    for mode in ("train", "infer"):
        torch.export.save(exported(model, mode), directory / f"{mode}.pt2")
    return Prepared()


def _load_module(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import torch

    if model.classes:
        importlib.import_module(model.classes)
    return torch.export.load(directory / f"{mode}.pt2").module()


EXPORTED_MODULE = System(
    "export module",
    "the module of a torch.export program, from a .pt2 file per mode",
    artefact="pt2",
    prepare=_prepare_module,
    load=_load_module,
    exports=False,
)
