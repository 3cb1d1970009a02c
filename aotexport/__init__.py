"""Turn a PyTorch model into a portable bundle: joint graph, weights and calling convention as data.

Importing this package does not import torch, so that the command line answers at once; `export` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aotexport.errors import ExportFailed, InternalError, ModelFileInvalid, VerificationFailed
from aotexport_runtime.errors import AotExportError, OutputExists

if TYPE_CHECKING:
    from aotexport.lower.targets import OnnxOptions
    from aotexport.model.programs import Example, Program
    from aotexport.model.recipes import Recipe, recipe
    from aotexport.model.step import Step
    from aotexport.pipeline.derive import derive
    from aotexport.pipeline.export import export
    from aotexport.pipeline.onnx import export_onnx
    from aotexport.pipeline.pt2 import convert
    from aotexport.verify.report import ExportReport

__version__ = "0.1.0"

__all__ = [
    "AotExportError",
    "Example",
    "ExportFailed",
    "ExportReport",
    "InternalError",
    "ModelFileInvalid",
    "OnnxOptions",
    "OutputExists",
    "Program",
    "Recipe",
    "Step",
    "VerificationFailed",
    "convert",
    "derive",
    "export",
    "export_onnx",
    "recipe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


_HOMES = {
    "Example": "aotexport.model.programs",
    "ExportReport": "aotexport.verify.report",
    "OnnxOptions": "aotexport.lower.targets",
    "Program": "aotexport.model.programs",
    "Recipe": "aotexport.model.recipes",
    "Step": "aotexport.model.step",
    "convert": "aotexport.pipeline.pt2",
    "derive": "aotexport.pipeline.derive",
    "export": "aotexport.pipeline.export",
    "export_onnx": "aotexport.pipeline.onnx",
    "recipe": "aotexport.model.recipes",
}
