"""Record the model's reads of layouts, dtypes and autograd's history: facts that a program may then be fixed to."""

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
    nodes = property(functools.partial(_node, effects, torch.Tensor.grad_fn))
    return [
        *_layouts(effects),
        *_dtypes(effects),
        *_inference_mode(effects),
        Patch(torch.Tensor, "grad_fn", nodes, "Record that the model reads nodes of autograd"),
        Patch(torch.Tensor, "grad", _refused_gradients(), "Refuse reads and changes of accumulated gradients"),
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


def _is_models_own(tensor: torch.Tensor, reader: FrameType) -> bool:
    """Return whether the model's code reads `tensor`; reads by code of a tensor subclass happen again in each call."""
    is_users = is_user_file(reader.f_code.co_filename)
    return is_users and not isinstance(tensor, nn.Parameter) and not within_subclass()


def _refused_gradients() -> property:
    """Return a property `grad` that refuses the model's own reads of leaves, and its changes.

    A trace has no accumulated gradients, and its graph does not change those of a call.
    """
    original: Any = torch.Tensor.grad

    def refuse(reader: FrameType, verb: str) -> None:
        if not is_user_file(reader.f_code.co_filename):
            return
        raise ExportFailed(
            f"{user_line()}the model {verb} `Tensor.grad`, the gradient that earlier passes left, which a bundle "
            "cannot hold. Do so outside of the model, or take gradients by `torch.autograd.grad`"
        )

    def read(self: torch.Tensor) -> Any:
        reader = caller()
        if self.requires_grad and self.is_leaf:
            refuse(reader, "reads")
        return original.__get__(self)

    def write(self: torch.Tensor, value: Any) -> None:
        refuse(caller(), "sets")
        original.__set__(self, value)

    def delete(self: torch.Tensor) -> None:
        refuse(caller(), "deletes")
        original.__delete__(self)

    return property(read, write, delete)


def _layouts(effects: Effects) -> list[Patch]:
    """Return patches that record the model's reads of layouts, and of `requires_grad` and `is_leaf`."""
    layout, history = "Record that the model reads layouts", "Record that the model reads `requires_grad`"
    return [
        *[
            Patch(torch.Tensor, name, _watched_method(name, effects), layout)
            for name in ("stride", "storage_offset", "is_contiguous", "dim_order")
        ],
        *[
            Patch(torch.Tensor, name, _watched_property(name, effects), history)
            for name in ("requires_grad", "is_leaf")
        ],
    ]


def _watched_method(name: str, effects: Effects) -> Any:
    """Return a method that reads the layout of a tensor, and records the model's own reads."""
    original = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_models_own(self, caller()):
            effects.reads.add("layout")
        return original(self, *args, **kwargs)

    return read


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


def _inference_mode(effects: Effects) -> Iterator[Patch]:
    """Yield patches that record that the model asks whether inference mode is on."""

    def noting(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if is_user_file(caller().f_code.co_filename):
                effects.reads.add("inference_mode")
            return function(*args)

        return call

    for owner, name in ((torch, "is_inference_mode_enabled"), (torch, "is_inference"), (torch.Tensor, "is_inference")):
        yield Patch(owner, name, noting(getattr(owner, name)), "Record that the model asks for inference mode")


class _Node:
    """A node of autograd's graph, handed to the model; it refuses hooks, which a trace cannot record on nodes."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, hook: Any) -> Any:
        """Refuse: see the class."""
        return refused("Node.register_hook", "Register hooks on tensors instead")()

    def register_prehook(self, hook: Any) -> Any:
        """Refuse: see the class."""
        return refused("Node.register_prehook", "Register hooks on tensors instead")()


def _node(effects: Effects, original: Any, self: torch.Tensor) -> Any:
    """Replace `self.grad_fn`, recording the model's own reads."""
    node = original.__get__(self)
    if not _is_models_own(self, caller()):
        return node
    effects.reads.add("is_leaf")
    return _Node(node) if effects.questions.ask(self) and node is not None else None


def _watched_property(name: str, effects: Effects) -> Any:
    """Return a property of autograd on a tensor that records the model's own reads."""
    original = getattr(torch.Tensor, name)

    def read(self: torch.Tensor) -> Any:
        if is_user_file(caller().f_code.co_filename) and not within_subclass():
            if name == "is_leaf" and not isinstance(self, nn.Parameter):
                effects.reads.add("is_leaf")
            if not effects.questions.ask(self):
                return name == "is_leaf"
        return original.__get__(self)

    return property(read, original.__set__ if hasattr(original, "__set__") else None)
