"""Turn a PyTorch model into a portable bundle: joint graph, weights and calling convention as data.

Importing this package does not import torch, so that the command line answers at once; `export` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotexport.errors import AotExportError, ExportFailed, ModelFileInvalid, OutputExists, VerificationFailed

if TYPE_CHECKING:
    from aotexport.pipeline import ExportReport, export

__version__ = "0.1.0"

__all__ = [
    "AotExportError",
    "ExportFailed",
    "ExportReport",
    "ModelFileInvalid",
    "OutputExists",
    "VerificationFailed",
    "export",
]


def __getattr__(name: str) -> Any:
    if name not in ("ExportReport", "export"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aotexport import pipeline

    return getattr(pipeline, name)
