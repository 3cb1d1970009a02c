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
        _dtype(effects),
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


_TENSOR: Any = torch.Tensor

READ_DTYPES: dict[Any, Callable[..., Iterable[Any]]] = {
    **dict.fromkeys((_TENSOR.itemsize.__get__, _TENSOR.nbytes.__get__, _TENSOR.element_size), lambda self: (self,)),
    torch.result_type: lambda *args, **named: (*args, *named.values()),
    # Another tensor's dtype, and the text of its own.
    _TENSOR.to: lambda self, *to, other=None, **_: (*to[:1], other),
    _TENSOR.type: lambda self, *to, **named: () if to or named else (self,),
    _TENSOR.new_tensor: lambda self, *data, dtype=None, **_: () if dtype else (self,),
}
"""The values whose dtypes a function reads, of its arguments; `dtype` itself is read in torch's layers, too."""


def note_dtypes(effects: Effects, values: Iterable[Any], reader: FrameType) -> None:
    """Note that the model's code, if it is that, reads the dtypes of the tensors among some values."""
    if is_models_code(reader.f_code.co_filename):
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        effects.dtypes_read.update(node_of(each) for each in tensors if not isinstance(each, nn.Parameter))


def _dtype(effects: Effects) -> Patch:
    """Return a patch that notes the values whose dtypes the model reads; a mode is off within torch's functions."""
    dtype_of = _TENSOR.dtype.__get__

    def read(tensor: torch.Tensor) -> torch.dtype:
        note_dtypes(effects, (tensor,), caller())
        return dtype_of(tensor)

    return Patch(torch.Tensor, "dtype", property(read), "Record that the model reads dtypes")


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
