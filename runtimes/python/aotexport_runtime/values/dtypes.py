"""Conversion between torch's enumerations and their names in the format. The only table of its kind."""

from __future__ import annotations

import torch

from aotexport_runtime.errors import NotSupported


def dtype(name: str) -> torch.dtype:
    """Return the `torch.dtype` called `name`.

    Raises:
        NotSupported: this torch does not have it.
    """
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise NotSupported(f"this torch ({torch.__version__}) has no dtype `{name}`; install a newer one")
    return value


def layout(name: str) -> torch.layout:
    """Return the `torch.layout` called `name`.

    Raises:
        NotSupported: this torch does not have it.
    """
    value = getattr(torch, name, None)
    if not isinstance(value, torch.layout):
        raise NotSupported(f"this torch ({torch.__version__}) has no layout `{name}`; install a newer one")
    return value


MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def name_of(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return the format's name of a torch enumeration value (`torch.float32` -> `float32`)."""
    return str(value).removeprefix("torch.")
