"""Hostile arguments for operators, drawn from the types in their schemas: the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
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
_ANYTHING = object()
_FIXED = {"Layout": torch.strided, "Device": torch.device("cpu"), "MemoryFormat": torch.contiguous_format}


class Arguments:
    """Draws the arguments of one call; tensors of a call often have a shape or a dtype in common.

    With valid calls to begin with (`tests.fuzz.valid_calls`), most arguments are like those of one of them.
    """

    def __init__(self, seed: str, valid_calls: Sequence[dict[str, Any]] = ()) -> None:
        """Begin with a seed."""
        self._valid_calls = valid_calls
        self._random = random.Random(seed)
        self._shapes: list[list[int]] = []
        self._dtypes: list[torch.dtype] = []

    def of(self, schema: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for an operator's schema; some defaults stay."""
        args, kwargs = list[Any](), dict[str, Any]()
        patterns = self._patterns(schema)
        for argument in schema.arguments:
            if argument.name in patterns:
                value = self._like(patterns[argument.name])
            elif argument.has_default_value() and self._chance(0.4):
                value = argument.default_value
            else:
                value = self._value(str(argument.real_type))
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _patterns(self, schema: Any) -> dict[str, Any]:
        """Return what the arguments of a valid call were, one or two of them changed."""
        if not self._valid_calls:
            return {}
        call = self._random.choice(self._valid_calls)
        names = [argument.name for argument in schema.arguments]
        places = [name for name in names if name not in call and schema_writes(schema, name)]
        patterns = {name: pattern for name, pattern in call.items() if name in names}
        patterns |= dict(zip(places, call["results"], strict=False))
        for name in self._random.sample(sorted(patterns), min(len(patterns), self._random.choice((0, 1, 1, 2)))):
            patterns[name] = self._changed(patterns[name])
            if patterns[name] is _ANYTHING:
                del patterns[name]
        return patterns

    def _changed(self, pattern: Any) -> Any:
        """Return another argument than that of a valid call; `_ANYTHING`: draw it from its type alone."""
        choose = self._random.choice
        if isinstance(pattern, bool) or pattern is None or self._chance(0.2):
            return _ANYTHING
        if isinstance(pattern, int):
            return pattern + choose((-2, -1, 1, 2)) if self._chance(0.7) else choose((*_SMALL, *_HUGE))
        if isinstance(pattern, list) and pattern:
            at = self._random.randrange(len(pattern))
            item = self._changed(pattern[at])
            return pattern[:at] + pattern[at + 1 :] if item is _ANYTHING else [*pattern[:at], item, *pattern[at + 1 :]]
        if isinstance(pattern, dict) and "shape" in pattern:
            kind = choose(("range", "shape", "shape", "dtype") if pattern["range"] else ("shape", "shape", "dtype"))
            if kind == "range":
                low, high = pattern["range"]
                return pattern | {"range": choose(([low - 1, high], [low, high + 1], [-9, 9], [_HUGE[-2], _HUGE[-1]]))}
            if kind == "dtype":
                return pattern | {"dtype": str(choose(_DTYPES)).removeprefix("torch.")}
            shape = list(pattern["shape"]) or [1]
            shape[self._random.randrange(len(shape))] = choose(_SIZES)
            return pattern | {"shape": choose((shape, shape, shape[1:], [2, *shape]))}
        return _ANYTHING

    def _like(self, pattern: Any) -> Any:
        """Return an argument like that of a valid call."""
        if isinstance(pattern, list):
            return [self._like(item) for item in pattern]
        if not isinstance(pattern, dict):
            return pattern
        dtype = getattr(torch, pattern["dtype"])
        if "shape" not in pattern:
            return dtype
        count, limits = math.prod(pattern["shape"]), pattern["range"]
        if limits and not dtype.is_floating_point and not dtype.is_complex:
            bounds = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            low, high = (max(bounds[0], min(bounds[1], limit)) for limit in limits)
            numbers = [self._random.randint(low, high) for _ in range(count)]
            tensor = torch.tensor(numbers, dtype=torch.int64).to(dtype)
        else:
            tensor = self._filled(count, dtype)
        tensor = tensor.reshape(pattern["shape"])
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 1 and self._chance(0.2) else tensor

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


def schema_writes(schema: Any, name: str) -> bool:
    """Return whether a call of an operator writes into the argument `name`."""
    return any(item.name == name and item.alias_info and item.alias_info.is_write for item in schema.arguments)
