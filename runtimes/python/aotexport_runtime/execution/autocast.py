"""The autocast and the random state around a call, also for code that runs again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
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


def draws_of_now(tensors: Iterable[torch.Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes contexts which draw what is drawn from now on, on processors and these devices."""
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    state, states = torch.get_rng_state(), [*map(torch.cuda.get_rng_state, devices)]

    @contextlib.contextmanager
    def again() -> Generator[None]:
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            for device, own in zip(devices, states, strict=True):
                torch.cuda.set_rng_state(own, device)
            yield

    return again


def under_autocast(device_type: str, dtype: str | None) -> AbstractContextManager[Any]:
    """Return a context with autocast to `dtype`; None: it is off."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    return torch.autocast(
        device_type, dtype=None if dtype is None else getattr(torch, dtype), enabled=dtype is not None
    )
