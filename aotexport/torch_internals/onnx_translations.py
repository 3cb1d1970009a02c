"""The translations of torch's ONNX exporter, read once for all models of a process."""

from __future__ import annotations

import contextlib
import copy
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals import releases


def translations_read_once() -> AbstractContextManager[None]:
    """Have torch's exporter read its translations of operators at the first model alone, which takes 0.6 s.

    A release of torch that the tests were not run with reads them for each model.
    """
    if not releases.is_tested():
        return contextlib.nullcontext()
    from torch._export import utils
    from torch.onnx._internal.exporter import _registration

    list_operators = functools.cache(utils._materialize_cpp_cia_ops)
    reason = "Read the translations of operators once, not for every model"
    owner: Any = _registration.ONNXRegistry
    read = owner.from_torchlib
    return patched(
        Patch(owner, "from_torchlib", staticmethod(functools.partial(_copied, read)), reason),
        Patch(utils, "_materialize_cpp_cia_ops", lambda: list_operators(), "List the composite operators once"),
    )


def _copied(read: Any, **options: int) -> Any:
    """Return a registry of its own for a model, whose translations may be added to it."""
    registry = copy.copy(_once(read, len(torch._C._dispatch_get_all_op_names()), **options))
    registry.functions = {target: list(found) for target, found in registry.functions.items()}
    return registry


@functools.cache
def _once(read: Any, operators: int, **options: int) -> Any:
    """Return the registry for a number of operators: torch leaves out translations of those that are missing."""
    return read(**options)
