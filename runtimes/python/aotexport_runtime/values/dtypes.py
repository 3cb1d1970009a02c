"""Conversion between torch's enumerations and their names in the format."""

from __future__ import annotations

import torch

from aotexport_runtime.errors import NotSupported


def dtype(name: str) -> torch.dtype:
    """Return the `torch.dtype` called `name`; one that this torch lacks is refused (`NotSupported`)."""
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise NotSupported(f"this torch ({torch.__version__}) has no dtype `{name}`; install a newer one")
    return value


def name_of(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return the format's name of a torch enumeration value (`torch.float32` -> `float32`)."""
    return str(value).removeprefix("torch.")
