"""The translations of torch's ONNX exporter, read once for all models of a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from aotexport.process.patches import Patch, patched


def translations_read_once() -> AbstractContextManager[None]:
    """Have torch's exporter parse its translations of operators at the first model alone, which takes 0.4 s."""
    from torch.onnx._internal import _lazy_import

    owner: Any = _lazy_import.onnxscript_apis  # pyright: ignore[reportPrivateImportUsage]
    read = owner.get_torchlib_ops
    reason = "Read the translations of operators once, not for every model"
    return patched(Patch(owner, "get_torchlib_ops", lambda: _once(read), reason))


@functools.cache
def _once(read: Callable[[], Any]) -> Any:
    return read()
