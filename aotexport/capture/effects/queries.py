"""Record the model's reads of dtypes, autocast and inference mode: facts that a program may then be fixed to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
    """Patch dtype and autocast queries to record that the model reads them."""

    def note(value: Any, reader: FrameType) -> None:
        is_computed = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if is_computed and is_models_code(reader.f_code.co_filename):
            effects.dtypes_read.add(node_of(value))

    def watched(original: Any) -> property:
        def read(self: torch.Tensor) -> Any:
            note(self, caller())
            return original.__get__(self)

        return property(read)

    def reading(function: Any, read: Callable[..., Iterable[Any]]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            reader = caller()
            for value in read(*args, **kwargs):
                note(value, reader)
            return function(*args, **kwargs)

        return call

    def noting(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            file = caller().f_code.co_filename
            effects.asks_autocast |= is_models_code(file) or file.startswith(_AUTOCAST)
            return function(*args)

        return call

    asked = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype")
    reason = "Record that the model reads dtypes"
    queries = [Patch(torch, name, noting(getattr(torch, name)), reason) for name in asked]
    tensor, everything = torch.Tensor, lambda *args: args
    return [
        *[Patch(tensor, name, watched(getattr(tensor, name)), reason) for name in ("dtype", "itemsize", "nbytes")],
        Patch(tensor, "element_size", reading(tensor.element_size, everything), reason),
        # Another tensor's dtype, and the text of its own.
        Patch(tensor, "to", reading(tensor.to, lambda self, *to, other=None, **_: (*to[:1], other)), reason),
        Patch(tensor, "type", reading(tensor.type, lambda self, *to, **named: () if to or named else (self,)), reason),
        Patch(
            tensor,
            "new_tensor",
            reading(tensor.new_tensor, lambda self, *data, dtype=None, **_: () if dtype else (self,)),
            reason,
        ),
        Patch(torch, "result_type", reading(torch.result_type, everything), reason),
        *queries,
    ]


def _inference_mode(effects: Effects) -> Patch:
    original = torch.is_inference_mode_enabled

    def is_inference_mode_enabled() -> bool:
        if is_user_file(caller().f_code.co_filename):
            effects.reads.add("inference_mode")
        return original()

    reason = "Record that the model asks for inference mode"
    return Patch(torch, "is_inference_mode_enabled", is_inference_mode_enabled, reason)
