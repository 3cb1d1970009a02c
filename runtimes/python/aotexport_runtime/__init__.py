"""The runtime of aotexport: loads a bundle without the model's code, and serves or trains it.

Importing this package, opening a bundle and inspecting it do not import torch; `load` does, but for target `onnx`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotexport_runtime.bundle import Bundle, open_bundle
from aotexport_runtime.errors import (
    AotExportError,
    ArgumentInvalid,
    BundleInvalid,
    BundleTooNew,
    CallInvalid,
    CheckFailed,
    NotSupported,
    SelfTestFailed,
)

if TYPE_CHECKING:
    from aotexport_runtime.engines.cuda.options import CudaRuntime
    from aotexport_runtime.engines.onnx.module import OnnxModule
    from aotexport_runtime.engines.onnx.session import OnnxRuntime
    from aotexport_runtime.loading import load
    from aotexport_runtime.module import BundleModule
    from aotexport_runtime.saving import save
    from aotexport_runtime.self_test import selftest

__version__ = "0.1.0"

_LATER = {
    "BundleModule": "module",
    "CudaRuntime": "engines.cuda.options",
    "OnnxModule": "engines.onnx.module",
    "OnnxRuntime": "engines.onnx.session",
    "load": "loading",
    "save": "saving",
    "selftest": "self_test",
}
"""Names by the module that they are in, which most callers need not import, or which imports torch."""

_WITH_TORCH = ("BundleModule", "save", "selftest")
"""Those of them that are of no use without torch."""

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
    "NotSupported",
    "OnnxModule",
    "OnnxRuntime",
    "SelfTestFailed",
    "load",
    "open_bundle",
    "save",
    "selftest",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name in _WITH_TORCH:
        from aotexport_runtime.arguments import check_torch

        check_torch(f"`aotexport_runtime.{name}`")
    return getattr(importlib.import_module(f"aotexport_runtime.{_LATER[name]}"), name)
