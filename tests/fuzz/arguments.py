"""Hostile arguments for operators, drawn from the types in their schemas: the same for the same seed."""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

_DTYPES = (
    *(torch.float32, torch.float32, torch.float64, torch.int64, torch.int64),
    *(torch.int32, torch.bool, torch.complex64, torch.uint8, torch.bfloat16),
    *(torch.float16, torch.int8, torch.int16, torch.complex128),
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
        self._generator = torch.Generator().manual_seed(self._random.getrandbits(63))
        self._shapes: list[list[int]] = []
        self._dtypes: list[torch.dtype] = []

    def of(self, schema: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for an operator's schema; some defaults stay."""
        args, kwargs = list[Any](), dict[str, Any]()
        patterns = self._patterns(schema)
        for argument in schema.arguments:
            if argument.name in patterns:
                value = self._like(patterns[argument.name])
            elif argument.has_default_value() and self._chance(0.85 if patterns else 0.4):
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
        places = [argument for argument in schema.arguments if argument.is_write and argument.name not in call]
        patterns = {name: pattern for name, pattern in call.items() if name in names}
        if places and str(places[0].real_type) == "List[Tensor]":
            patterns[places[0].name] = call["results"]
        else:
            patterns |= dict(zip((place.name for place in places), call["results"], strict=False))
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
            low, high = (max(_least(dtype), min(_most(dtype), limit)) for limit in limits)
            tensor = self._integers(count, low, high, dtype)
        else:
            tensor = self._filled(count, dtype)
        return self._laid_out(tensor.reshape(pattern["shape"]))

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is, or with the same shape and other strides, or with elements that share a place."""
        if tensor.dim() == 0 or self._chance(0.65):
            return tensor
        kind, axis = self._random.choice(("transposed", "stepped", "behind", "expanded")), tensor.dim() - 1
        if kind == "transposed":
            return tensor.transpose(0, axis).contiguous().transpose(0, axis)
        if kind == "stepped":
            return tensor.repeat_interleave(2, axis)[..., ::2]
        if kind == "behind":
            return torch.cat((tensor, tensor))[tensor.shape[0] :]
        return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor

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
        return self._laid_out(self._filled(math.prod(shape), dtype).reshape(shape))

    def _filled(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        choose = self._random.choice
        if dtype in (torch.bool, torch.uint8):
            return self._integers(count, 0, _most(dtype), dtype)
        if not dtype.is_floating_point and not dtype.is_complex:
            least, most = _least(dtype), _most(dtype)
            huge = [number for number in (*_HUGE, least, most) if least <= number <= most]
            numbers = _SMALL if self._chance(0.8) else (*_SMALL, *huge)
            return torch.tensor(self._random.choices(numbers, k=count), dtype=dtype)
        scale = choose((1.0, 1.0, 1e30, 0.0, math.nan))
        return torch.randn(count, generator=self._generator, dtype=torch.float64).mul_(scale).to(dtype)

    def _integers(self, count: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        """Return integers from `low` to `high`; the greatest of 64 bits is left out."""
        above = min(high + 1, _HUGE[-1])
        return torch.randint(low, above, (count,), generator=self._generator, dtype=torch.int64).to(dtype)


def copied(value: Any) -> Any:
    """Return an argument in new memory: a tensor with the same strides, in memory that ends where it ends."""
    if isinstance(value, list):
        return [copied(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 0 or (value.is_contiguous() and value.storage_offset() == 0):
        return value.clone()
    steps = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    count = value.storage_offset() + steps + 1
    storage = value.as_strided((count,), (1,), 0).clone().untyped_storage()
    # Not a view, which some operators refuse to write into.
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


def _least(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
