"""The runtime of aotexport: loads a bundle without the model's code, and serves or trains it.

Importing this package, opening a bundle and inspecting it do not import torch; `load` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotexport_runtime.bundle import Bundle, open_bundle
from aotexport_runtime.errors import (
    AotExportError,
    BundleInvalid,
    BundleTooNew,
    CallInvalid,
    NotSupported,
    SelfTestFailed,
)

if TYPE_CHECKING:
    from aotexport_runtime.loading import load
    from aotexport_runtime.module import BundleModule
    from aotexport_runtime.saving import save
    from aotexport_runtime.self_test import selftest

__version__ = "0.1.0"

_NEED_TORCH = {"load": "loading", "BundleModule": "module", "save": "saving", "selftest": "self_test"}

__all__ = [
    "AotExportError",
    "Bundle",
    "BundleInvalid",
    "BundleModule",
    "BundleTooNew",
    "CallInvalid",
    "NotSupported",
    "SelfTestFailed",
    "load",
    "open_bundle",
    "save",
    "selftest",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"aotexport_runtime.{_NEED_TORCH[name]}"), name)
