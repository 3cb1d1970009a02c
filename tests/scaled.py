"""Tensor subclasses of the tests: weights of eight bits with a scale, as libraries of quantisation have them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


class Block(NamedTuple):
    rows: int = 1
    columns: int = -1


ONE_ROW = Block()


@dataclasses.dataclass(frozen=True)
class Recipe:
    rounding: Rounding = Rounding.NEAREST
    block: Block = ONE_ROW
    dtypes: tuple[torch.dtype | None, ...] = (torch.int8, None)


class ScaledInt8(Tensor):
    """A matrix of eight-bit integers with a scale per row; operators compute with what it stands for."""

    integers: Tensor
    scale: Tensor
    recipe: Recipe

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor, recipe: Recipe) -> ScaledInt8:
        return Tensor._make_wrapper_subclass(
            cls, integers.shape, strides=integers.stride(), dtype=scale.dtype, device=integers.device
        )

    def __init__(self, integers: Tensor, scale: Tensor, recipe: Recipe) -> None:
        self.integers, self.scale, self.recipe = integers, scale, recipe

    @classmethod
    def of(cls, dense: Tensor, recipe: Recipe | None = None) -> ScaledInt8:
        scale = dense.abs().amax(1, keepdim=True) / 127
        return cls((dense / scale).round().to(torch.int8), scale, recipe or Recipe())

    def dense(self) -> Tensor:
        return self.integers.to(self.scale.dtype) * self.scale

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.integers!r}, {self.scale!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["integers", "scale"], self.recipe

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Recipe, size: Any, stride: Any) -> ScaledInt8:
        return cls(inner["integers"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(function(args[0].integers), function(args[0].scale), args[0].recipe)
        if function is aten.copy_.default and isinstance(args[1], cls):
            args[0].integers.copy_(args[1].integers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        dense = [x.dense() if isinstance(x, cls) else x for x in args]
        return function(*dense, **(kwargs or {}))


class FastInt8(ScaledInt8):
    """Takes linear layers above operators, where it scales results instead of weights."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear and isinstance(args[1], cls):
            x, weight, bias = (*args, *([None] * (3 - len(args))))
            bias = kwargs.get("bias", bias)
            y = (x @ weight.integers.to(x.dtype).t()) * weight.scale.t()
            return y if bias is None else y + bias
        with torch._C.DisableTorchFunctionSubclass():  # noqa: TID251 (as torch documents it)
            return function(*args, **kwargs)
