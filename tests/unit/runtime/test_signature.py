"""Binding and flattening of calls: which structure fits, and each violation in words."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import Parameter
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence

X, Y, Z = torch.zeros(2), torch.ones(3), torch.ones(1, 1)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any


def leaf(index: int) -> Leaf:
    return Leaf(index=index)


def constant(value: Any) -> Constant:
    return Constant(value=value)


def sequence(type_: Any, *items: Any) -> Sequence:
    return Sequence(type=type_, items=items)


def mapping(*, any_order: bool = False, **items: Any) -> Mapping:
    return Mapping(type="dict", keys=tuple(items), items=tuple(items.values()), any_order=any_order)


def pair(type_: Any, first: Any, second: Any) -> NamedFields:
    return NamedFields(type=type_, name="Pair", fields=("first", "second"), items=(first, second))


def parameter(name: str, tree: Any, kind: Any = "positional_or_keyword", *, optional: bool = False) -> Parameter:
    return Parameter(name=name, kind=kind, tree=tree, optional=optional)


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def flatten(parameters: list[Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[str]]:
    leaves: list[Any] = [None] * 4
    violations = Signature(tuple(parameters), lambda tree: tree.value).flatten(args, kwargs, leaves)
    return leaves, violations


PLAIN = [parameter("x", leaf(0)), parameter("y", leaf(1))]
DEFAULT = [parameter("x", leaf(0)), parameter("scale", constant(2.0), optional=True)]
VARIADIC = [
    parameter("x", leaf(0)),
    parameter("rest", sequence("tuple", leaf(1)), "var_positional"),
    parameter("more", mapping(z=leaf(2)), "var_keyword"),
]
NESTED = [parameter("x", mapping(a=sequence("list", leaf(0), constant(None)), b=sequence("tuple", leaf(1))))]
MANY = [f"key {number}" for number in range(40)]

FITTING = {
    "positional": (PLAIN, call(X, Y), [X, Y]),
    "default_passed_as_it_was": (DEFAULT, call(X, 2.0), [X]),
    "variadic": (VARIADIC, call(X, Y, z=Z), [X, Y, Z]),
    "nested": (NESTED, call({"a": [X, None], "b": (Y,)}), [X, Y]),
    "named_tuple": ([parameter("x", pair("namedtuple", leaf(0), leaf(1)))], call(Pair(X, Y)), [X, Y]),
    "dataclass": ([parameter("x", pair("dataclass", leaf(0), leaf(1)))], call(Record(X, Y)), [X, Y]),
    "mapping_with_the_fields": (
        [parameter("x", pair("model_output", leaf(0), leaf(1)))],
        call(collections.OrderedDict(first=X, second=Y)),
        [X, Y],
    ),
    "same_tensor_twice": ([parameter("x", leaf(0)), parameter("y", leaf(0))], call(X, X), [X]),
    "size": ([parameter("s", sequence("size", constant(2), constant(3)))], call(torch.Size([2, 3])), []),
    "cpu_of_an_index": ([parameter("s", constant(torch.device("cpu")))], call(torch.device("cpu:0")), []),
}


@pytest.mark.parametrize(("parameters", "call", "expected"), FITTING.values(), ids=FITTING)
def test_call_that_fits_is_flattened(parameters, call, expected):
    leaves, violations = flatten(parameters, *call)
    assert violations == []
    assert [id(value) for value in leaves] == [id(value) for value in [*expected, *[None] * (4 - len(expected))]]


UNFITTING = {
    "no_array": (
        [parameter("x", Leaf(index=0, array=True))],
        call(3),
        ["`x`: expected an array, as at capture; 3 is no `numpy.ndarray`"],
    ),
    "unexpected": (PLAIN, call(X, Y, z=Z), ["`z`: unexpected keyword argument; there are `x`, `y`"]),
    "constant_changed": (DEFAULT, call(X, 3.0), ["`scale`: expected 2.0, as at capture, got 3.0"]),
    "other_keys": (
        NESTED,
        call({"a": [X, None]}),
        ["`x`: expected a dict with keys ['a', 'b'] in this order; missing: 'b'"],
    ),
    "other_order": (
        NESTED,
        call({"b": (Y,), "a": [X, None]}),
        ["`x`: expected a dict with keys ['a', 'b'] in this order, got a dict with keys ['b', 'a']"],
    ),
    "zero_of_another_sign": (
        [parameter("s", constant(0.0))],
        call(-0.0),
        ["`s`: expected 0.0, as at capture, got -0.0"],
    ),
    "many_keys": (
        [parameter("x", mapping(**dict.fromkeys(MANY, leaf(0))))],
        call({}),
        ["`x`: " + f"expected a dict with keys {MANY} in this order; missing: {str(MANY)[1:-1]}"[:400]],
    ),
    "field_missing": (
        [parameter("x", pair("dataclass", leaf(0), leaf(1)))],
        call({"first": X}),
        ["`x`: expected a `Pair` with fields first, second, got a dict with keys ['first']"],
    ),
}


@pytest.mark.parametrize(("parameters", "call", "expected"), UNFITTING.values(), ids=UNFITTING)
def test_call_that_does_not_fit_is_told_every_violation(parameters, call, expected):
    assert flatten(parameters, *call)[1] == expected
