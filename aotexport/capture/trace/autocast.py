"""Autocast around the captured call: it is no part of the model, and must not show in the captured graph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from aotexport.model.call import ExampleCall
from aotexport_runtime.engines.autocast import autocast_dtype, under_autocast


def example_autocast(call: ExampleCall) -> Any:
    """Return the dtype of the autocast around the capture; None: there is none."""
    return autocast_dtype(_device_type(call))


def other_autocast(call: ExampleCall) -> AbstractContextManager[Any]:
    """Return a context with autocast, or without if the capture is under autocast."""
    return under_autocast(_device_type(call), "bfloat16" if example_autocast(call) is None else None)


def _device_type(call: ExampleCall) -> str:
    found = [tensor for tensor in call.tensors if isinstance(tensor, torch.Tensor)]
    state = call.module.state_dict(keep_vars=True).values() if call.module is not None else ()
    return next((tensor.device.type for tensor in (*found, *state)), "cpu")
