"""Turn a PyTorch model into a portable bundle: joint graph, weights and calling convention as data.

Importing this package does not import torch, so that the command line answers at once; `export` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aotexport.errors import AotExportError, ExportFailed, ModelFileInvalid, OutputExists, VerificationFailed

if TYPE_CHECKING:
    from aotexport.lower.onnx.bundle import export_onnx
    from aotexport.lower.onnx.options import OnnxOptions
    from aotexport.pipeline import export
    from aotexport.programs import Example, Program
    from aotexport.report import ExportReport

__version__ = "0.1.0"

__all__ = [
    "AotExportError",
    "Example",
    "ExportFailed",
    "ExportReport",
    "ModelFileInvalid",
    "OnnxOptions",
    "OutputExists",
    "Program",
    "VerificationFailed",
    "export",
    "export_onnx",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


_HOMES = {
    "Example": "aotexport.programs",
    "ExportReport": "aotexport.report",
    "OnnxOptions": "aotexport.lower.onnx.options",
    "Program": "aotexport.programs",
    "export": "aotexport.pipeline",
    "export_onnx": "aotexport.lower.onnx.bundle",
}
