"""Kinds of tensors: those that no bundle can hold, and subclasses of parameters without behaviour of their own."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from aotexport_runtime.values.subclasses import is_wrapper

_SEEN = "_aotexport_seen"
"""Attribute of fake tensors: class and attributes of the real tensor."""


def is_plain_class(type_: type) -> bool:
    """Return whether torch's operators treat tensors of a class as plain ones; parameters may have many classes."""
    return type_ in (torch.Tensor, nn.Parameter, nn.Buffer) or (
        issubclass(type_, nn.Parameter)
        and type_.__torch_function__ is nn.Parameter.__torch_function__
        and not _has_own_dispatch(type_)
    )


def dress(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give the fake of a state tensor (or of its fake) the class and attributes that the model's code can see."""
    if _SEEN in vars(tensor):
        vars(fake)[_SEEN] = vars(tensor)[_SEEN]
    elif is_plain_class(type(tensor)):
        vars(fake)[_SEEN] = type(tensor), dict(vars(tensor))
    for name, value in vars(fake).get(_SEEN, (None, {}))[1].items():
        vars(fake).setdefault(name, value)
    return fake


def class_of(value: torch.Tensor) -> type:
    """Return the class of the real tensor of a fake one, as far as it is known."""
    return vars(value).get(_SEEN, (type(value),))[0]


def why_not_held(tensor: torch.Tensor) -> str | None:
    """Return why a bundle cannot hold a tensor, and a way out; None: it can."""
    if tensor.is_meta:
        return "is on the meta device, and has no values. Make it on a real one"
    if tensor.is_nested:
        return "is a nested tensor, which a bundle cannot hold. Pass its values and offsets, or pad it"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; a bundle holds strided tensors. Convert it first (`to_dense()`)"
    if tensor.is_quantized:
        return "is a quantized tensor, which a bundle cannot hold. Pass its integers and scales, or `dequantize()` it"
    if is_wrapper(tensor):
        return None
    if _has_own_dispatch(type(tensor)):
        return (
            f"is a `{type(tensor).__name__}`, a class of tensors without `__tensor_flatten__`, which a bundle cannot "
            "hold. Give the class that method, or pass the tensors that it is made of"
        )
    return None


def _has_own_dispatch(type_: type) -> bool:
    """Return whether a class has code of its own below autograd."""
    name = "__torch_dispatch__"
    return inspect.getattr_static(type_, name) is not inspect.getattr_static(torch.Tensor, name)
