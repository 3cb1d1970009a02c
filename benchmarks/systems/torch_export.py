"""`torch.export.export`: the yardstick for what an export may cost. It is only prepared, never run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import Model
from benchmarks.systems.interface import Prepared, System


def _prepare(model: Model, directory: Path) -> Prepared:
    from torch.export import export

    inputs = model.inputs()
    args, kwargs = (inputs, None) if isinstance(inputs, tuple) else ((), dict(inputs))
    export(model.module(), args, kwargs)
    return Prepared()


TORCH_EXPORT = System(
    "torch.export", "torch.export.export, in the suite `export` alone", artefact="program", prepare=_prepare
)
