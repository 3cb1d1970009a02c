"""Hostile arguments for operators, drawn from the types in their schemas: the same for the same seed."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

_DTYPES = (
    *(torch.float32, torch.float32, torch.float64, torch.int64, torch.int64),
    *(torch.int32, torch.bool, torch.complex64, torch.uint8, torch.bfloat16),
)
_SMALL = (-3, -2, -1, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 7)
_HUGE = (64, 1 << 20, 1 << 31, 1 << 40, -(1 << 31), -(1 << 63), (1 << 63) - 1)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e30, math.inf, math.nan)
_WORDS = ("trunc", "floor", "none", "mean", "sum", "linear", "reflect", "left", "right", "ij", "lower", "replicate")
_SIZES = (0, 1, 1, 2, 2, 3, 4, 5)
_RANKS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)
_FIXED = {"Layout": torch.strided, "Device": torch.device("cpu"), "MemoryFormat": torch.contiguous_format}


class Arguments:
    """Draws the arguments of one call; tensors of a call often have a shape or a dtype in common."""

    def __init__(self, seed: str) -> None:
        """Begin with a seed."""
        self._random = random.Random(seed)
        self._shapes: list[list[int]] = []
        self._dtypes: list[torch.dtype] = []

    def of(self, schema: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for an operator's schema; some defaults stay."""
        args, kwargs = list[Any](), dict[str, Any]()
        for argument in schema.arguments:
            if argument.has_default_value() and self._chance(0.4):
                value = argument.default_value
            else:
                value = self._value(str(argument.real_type))
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _chance(self, part: float) -> bool:
        return self._random.random() < part

    def _value(self, kind: str) -> Any:
        choose = self._random.choice
        if kind.startswith("Optional["):
            return None if self._chance(0.4) else self._value(kind[9:-1])
        if kind.startswith("List["):
            most = 4 if kind in ("List[int]", "List[SymInt]") else 3
            return [self._value(kind[5:-1]) for _ in range(self._random.randint(0, most))]
        if kind == "Tensor":
            return self._tensor()
        if kind in ("int", "SymInt"):
            return choose(_SMALL if self._chance(0.9) else _HUGE)
        if kind == "float":
            return choose(_FLOATS)
        if kind == "bool":
            return self._chance(0.5)
        if kind in ("number", "Scalar"):
            return choose((0, 1, -1, 2, 0.5, True))
        if kind == "str":
            return choose(_WORDS)
        return choose(_DTYPES) if "dtype" in kind or kind == "ScalarType" else _FIXED.get(kind)

    def _tensor(self) -> torch.Tensor:
        choose = self._random.choice
        known = self._shapes and self._chance(0.6)
        shape = choose(self._shapes) if known else [choose(_SIZES) for _ in range(choose(_RANKS))]
        dtype = choose(self._dtypes) if self._dtypes and self._chance(0.6) else choose(_DTYPES)
        self._shapes.append(shape)
        self._dtypes.append(dtype)
        tensor = self._filled(math.prod(shape), dtype).reshape(shape)
        return tensor.transpose(0, 1) if tensor.dim() > 1 and self._chance(0.2) else tensor

    def _filled(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        choose = self._random.choice
        if dtype in (torch.int64, torch.int32):
            huge = _HUGE if dtype == torch.int64 else (-(1 << 31), (1 << 31) - 1)
            numbers = _SMALL if self._chance(0.8) else (*_SMALL, *huge)
            return torch.tensor([choose(numbers) for _ in range(count)], dtype=dtype)
        if dtype in (torch.bool, torch.uint8):
            return torch.tensor([self._random.randint(0, 1 if dtype == torch.bool else 255) for _ in range(count)]).to(
                dtype
            )
        scale = choose((1.0, 1.0, 1e30, 0.0, math.nan))
        return torch.tensor([self._random.gauss(0, 1) * scale for _ in range(count)], dtype=torch.float64).to(dtype)
