"""Nested inputs and outputs, signatures, constants."""

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.cases import case, slow_case
from tests.cases.mutations import leaf


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    extra: Any = None


class Scaling(enum.Enum):
    TWICE = "twice"
    NEVER = None


@case(lambda: (leaf(3), Scaling.TWICE, range(1, 7, 3)))
def enumeration_and_range(x, scaling, exponents):
    scale = 2 if scaling is Scaling.TWICE else 1
    return sum(scale * x**exponent for exponent in exponents)


@case(lambda: (leaf(3), {"twice", 3, None}, {("user", "rates"): leaf(3), ("user", 1): leaf(3)}))
def sets_and_tuple_keys(x, flags, edges):
    scale = 2 if "twice" in flags else 1
    return scale * x * edges["user", "rates"], frozenset(flags), {("user", 1): edges["user", 1] + x}


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.doubled = self.x * 2


class Encoding(collections.UserDict):
    """As tokenizers return it."""


@case(lambda: (Derived(torch.randn(3)), Encoding(ids=torch.arange(3), mask=torch.ones(3))))
def objects_made_by_code(record, encoding):
    encoding["seen"] = encoding["ids"] * encoding.pop("mask")
    return record.x + record.doubled + encoding["seen"]


class Boxes(list):
    """Data in a class of its own, with a method."""

    def largest(self):
        return torch.stack(self).amax(0)


class Corner(tuple):
    __slots__ = ()


@case(
    lambda: (
        leaf(3),
        {0.5: torch.randn(3), b"ab": leaf(3), (1.0, b""): torch.randn(3)},
        Boxes([leaf(3), torch.randn(3)]),
    )
)
def numbers_and_bytes_as_keys(x, table, boxes):
    table[2.5] = x * 2
    boxes.append(x)
    return boxes.largest() * table[0.5], {0.25: table[b"ab"] + x, b"c": 1}, Corner((x, Boxes([table[1.0, b""] * x])))


@case(lambda: (leaf(3, 3),))
def return_type_of_torchs_own(x):
    return torch._lu_with_info(x)


@case(lambda: (leaf(3, 4),))
def size_and_dtype(x):
    return x.shape, x.dtype, x * 1, x.dim(), x.is_floating_point()


@case(lambda: (leaf(3), torch.randn(3), torch.randn(3)), kwargs=lambda: {"a": torch.randn(3), "b": 2})
def variadic(x, *args, **kwargs):
    return x + sum(args) + kwargs["a"] * kwargs["b"]


@case(lambda: (leaf(3),), kwargs=lambda: {"x": torch.randn(3), "named": torch.randn(3)})
def keywords_named_like_parameters(x, /, **named):
    return x * named["x"] + named["named"]


@case(lambda: (leaf(3),))
def optional_arguments(x, y=None, n=3, *, z=1.5):
    return x * n * z if y is None else x + y


@case(lambda: ())
def no_arguments():
    return torch.ones(3), 7


class Scale:
    """An object of a class of its own."""

    def __init__(self, by, shift):
        self.by, self.shift = by, shift

    def __call__(self, x):
        return x * self.by + self.shift


class Slotted:
    __slots__ = ("calls", "weight")

    def __init__(self, weight):
        self.weight, self.calls = weight, 0


@case(lambda: (leaf(3), Scale(2.0, torch.randn(3)), Slotted(leaf(3))))
def objects_of_own_classes(x, scale, slotted):
    scale.shift = scale.shift + 1
    slotted.calls += 1
    return scale(x) * slotted.weight, Scale(3, x * 2)


@case(lambda: (leaf(3), b"ab", range(3), np.float32(1.5), np.int64(2), ...))
def values_that_no_operator_takes(x, text, steps, scale, count, rest):
    return x * scale * count + sum(steps), x[rest] * len(text), text, steps, np.float64(2.5), rest


@case(lambda: (leaf(3), collections.deque([torch.randn(3), torch.randn(3)], maxlen=2), collections.Counter("aab")))
def deques_and_counters(x, last, counts):
    last.append(x * 2)
    counts["a"] += 1
    made = collections.defaultdict(list)
    made["x"].append(x * counts["a"])
    return last[0] + x, made, collections.deque([x + 1], maxlen=3), collections.Counter("abb")


@case(lambda: (leaf(3), {"a", "b"}))
def set_of_the_caller_changed(x, names):
    names.discard("a")
    names.add("c")
    return x * len(names)


@dataclasses.dataclass
class Configured:
    x: torch.Tensor
    factor: dataclasses.InitVar[int] = 2

    def __post_init__(self, factor):
        self.scale = factor * 1.5


@slow_case(lambda: (Configured(leaf(3), 3),))
def dataclass_with_more_than_its_fields(record):
    record.seen = record.x * 2
    return record.x * record.scale, Configured(record.x + 1)


@case(lambda: (leaf(3), torch.device("cpu", 0)))
def device_with_an_index(x, device):
    return x.to(device) * 2, torch.zeros(3, device=device)
