"""The autocast around a call: operators of eager, and of a forward graph, choose their dtypes by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from aotexport_runtime.schema.program import Program, SizeInput


def device_type_of(program: Program, place: torch.device | None) -> str:
    """Return the type of devices that a program runs on; `place`: where its bundle was loaded to; None: as captured."""
    if place is not None:
        return place.type
    return next((spec.meta.device for spec in program.inputs if not isinstance(spec, SizeInput)), "cpu")


def autocast_dtype(device_type: str) -> Any:
    """Return torch's name of the dtype of autocast on a type of devices; None: autocast is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def autocast_of_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes contexts with the current autocast, for code that runs again in backward."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)


def under_autocast(device_type: str, dtype: str | None) -> AbstractContextManager[Any]:
    """Return a context with autocast to `dtype`; None: it is off."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    if dtype is None:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=getattr(torch, dtype))
