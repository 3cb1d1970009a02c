"""The runtime of aotexport: loads a bundle without the model's code, and serves or trains it.

Importing this package, opening a bundle and inspecting it do not import torch; `load` does, but for ONNX models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.errors import (
    AotExportError,
    ArgumentInvalid,
    BundleInvalid,
    BundleTooNew,
    CallInvalid,
    CheckFailed,
    HubFailed,
    NotSupported,
    NotWritten,
    OutputExists,
    SelfTestFailed,
)

if TYPE_CHECKING:
    from aotexport_runtime.bundle.signature import Signed
    from aotexport_runtime.commands.hub import pull, push
    from aotexport_runtime.commands.saving import save
    from aotexport_runtime.commands.self_test import selftest
    from aotexport_runtime.engines.cuda import CudaRuntime
    from aotexport_runtime.engines.onnx.session import OnnxRuntime
    from aotexport_runtime.engines.openvino.session import OpenVino
    from aotexport_runtime.generation.generate import generate
    from aotexport_runtime.module.bundle_module import BundleModule
    from aotexport_runtime.module.loading import load
    from aotexport_runtime.module.onnx_module import OnnxModule
    from aotexport_runtime.schema.limits import Limits
    from aotexport_runtime.serving.servable import Servable

__version__ = "0.1.0"

_LATER = {
    "BundleModule": "module.bundle_module",
    "CudaRuntime": "engines.cuda",
    "Limits": "schema.limits",
    "OnnxModule": "module.onnx_module",
    "OnnxRuntime": "engines.onnx.session",
    "OpenVino": "engines.openvino.session",
    "Servable": "serving.servable",
    "Signed": "bundle.signature",
    "generate": "generation.generate",
    "load": "module.loading",
    "pull": "commands.hub",
    "push": "commands.hub",
    "save": "commands.saving",
    "selftest": "commands.self_test",
}
"""Names by the module that they are in, which most callers need not import, or which imports torch."""

__all__ = [
    "AotExportError",
    "ArgumentInvalid",
    "Bundle",
    "BundleInvalid",
    "BundleModule",
    "BundleTooNew",
    "CallInvalid",
    "CheckFailed",
    "CudaRuntime",
    "HubFailed",
    "Limits",
    "NotSupported",
    "NotWritten",
    "OnnxModule",
    "OnnxRuntime",
    "OpenVino",
    "OutputExists",
    "SelfTestFailed",
    "Servable",
    "Signed",
    "generate",
    "load",
    "open_bundle",
    "pull",
    "push",
    "save",
    "selftest",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"aotexport_runtime.{_LATER[name]}"), name)
    except ImportError:
        from aotexport_runtime.values.arguments import check_torch

        check_torch(f"`aotexport_runtime.{name}`")
        raise
