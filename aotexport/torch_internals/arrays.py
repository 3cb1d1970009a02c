"""Torch's counterpart of NumPy: its functions and arrays (`ndarray`), computed by torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._numpy as counterparts
from torch._numpy._ndarray import ndarray


def counterpart(module: str, name: str) -> Callable[..., Any] | None:
    """Return torch's counterpart of a function of NumPy (module `numpy` or one below); None: it has none."""
    found: Any = counterparts
    for part in (*module.split(".")[1:], name):
        found = getattr(found, part, None)
    return found


def counterpart_method(name: str) -> Callable[..., Any] | None:
    """Return a method of torch's counterpart of an array, to be called on one; None: it has none."""
    method = getattr(ndarray, name, None)
    return method if callable(method) else None
