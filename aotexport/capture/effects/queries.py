"""Record the model's reads of dtypes, autocast and inference mode: facts that a program may then be fixed to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.record import Effects
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import is_user_file, user_line
from aotexport.process.patches import Patch, caller
from aotexport.torch_internals.subclasses import within_subclass
from aotexport.torch_internals.tracing import node_of

_LAYERS = str(Path(nn.__file__).parent)
"""Torch's own layers count as the model's code; code that operators run on fake tensors does not."""

_AUTOCAST = str(Path(torch.amp.__file__).parent)
"""Autocast regions and custom autograd functions (`torch.amp.custom_fwd`) query autocast from here."""


def patches(effects: Effects) -> list[Patch]:
    """Return patches that record such reads."""
    return [
        *_dtypes(effects),
        *_autocast(effects),
        _inference_mode(effects),
        Patch(
            nn.Module,
            "zero_grad",
            refused("Module.zero_grad", "Call it outside of the model"),
            "Refuse to reset gradients in the model",
        ),
    ]


def refused(call: str, way_out: str) -> Any:
    """Return a function that refuses the model's call of `call`."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ExportFailed(f"{user_line()}the model calls `{call}`, which a bundle cannot hold. {way_out}")

    return refuse


def is_models_code(file: str) -> bool:
    """Return whether a file counts as the model's code."""
    return is_user_file(file) or file.startswith(_LAYERS)


def is_models_own(tensor: torch.Tensor, reader: FrameType) -> bool:
    """Return whether the model's code reads `tensor`; reads by code of a tensor subclass happen again in each call."""
    is_users = is_user_file(reader.f_code.co_filename)
    return is_users and not isinstance(tensor, nn.Parameter) and not within_subclass()


def _dtypes(effects: Effects) -> list[Patch]:
    """Patch dtype queries to record the values whose dtypes the model reads, those that `read` gives."""

    def noting(function: Any, read: Callable[..., Iterable[Any]] = lambda *args: args) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_models_code(caller().f_code.co_filename):
                tensors = [value for value in read(*args, **kwargs) if isinstance(value, torch.Tensor)]
                effects.dtypes_read.update(node_of(each) for each in tensors if not isinstance(each, nn.Parameter))
            return function(*args, **kwargs)

        return call

    tensor: Any = torch.Tensor
    properties = {name: property(noting(getattr(tensor, name).__get__)) for name in ("dtype", "itemsize", "nbytes")}
    methods = {
        "element_size": noting(tensor.element_size),
        # Another tensor's dtype, and the text of its own.
        "to": noting(tensor.to, lambda self, *to, other=None, **_: (*to[:1], other)),
        "type": noting(tensor.type, lambda self, *to, **named: () if to or named else (self,)),
        "new_tensor": noting(tensor.new_tensor, lambda self, *data, dtype=None, **_: () if dtype else (self,)),
    }
    reason = "Record that the model reads dtypes"
    return [
        *[Patch(tensor, name, query, reason) for name, query in (properties | methods).items()],
        Patch(torch, "result_type", noting(torch.result_type), reason),
    ]


def _autocast(effects: Effects) -> Iterator[Patch]:
    """Yield patches of autocast queries that record that the model asks."""

    def noting(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            file = caller().f_code.co_filename
            effects.asks_autocast |= is_models_code(file) or file.startswith(_AUTOCAST)
            return function(*args)

        return call

    for name in ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype"):
        yield Patch(torch, name, noting(getattr(torch, name)), "Record that the model asks for autocast")


def _inference_mode(effects: Effects) -> Patch:
    original = torch.is_inference_mode_enabled

    def is_inference_mode_enabled() -> bool:
        if is_user_file(caller().f_code.co_filename):
            effects.reads.add("inference_mode")
        return original()

    reason = "Record that the model asks for inference mode"
    return Patch(torch, "is_inference_mode_enabled", is_inference_mode_enabled, reason)
