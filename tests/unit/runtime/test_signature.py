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


def flatten(parameters: list[Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[str]]:
    leaves: list[Any] = [None] * 4
    violations = Signature(tuple(parameters), lambda tree: tree.value).flatten(args, kwargs, leaves)
    return leaves, violations


BY_KEY = [parameter("x", mapping(a=leaf(0), b=leaf(1), any_order=True))]
PLAIN = [parameter("x", leaf(0)), parameter("y", leaf(1))]
DEFAULT = [parameter("x", leaf(0)), parameter("scale", constant(2.0), optional=True)]
KEYWORD = [parameter("x", leaf(0)), parameter("y", leaf(1), "keyword_only")]
VARIADIC = [
    parameter("x", leaf(0)),
    parameter("rest", sequence("tuple", leaf(1)), "var_positional"),
    parameter("more", mapping(z=leaf(2)), "var_keyword"),
]
NESTED = [parameter("x", mapping(a=sequence("list", leaf(0), constant(None)), b=sequence("tuple", leaf(1))))]
POSITIONAL = [parameter("x", leaf(0), "positional_only"), parameter("y", leaf(1))]

FITTING = {
    "positional": (PLAIN, (X, Y), {}, [X, Y]),
    "by_keyword": (PLAIN, (), {"y": Y, "x": X}, [X, Y]),
    "mixed": (PLAIN, (X,), {"y": Y}, [X, Y]),
    "default_left_out": (DEFAULT, (X,), {}, [X]),
    "default_passed_as_it_was": (DEFAULT, (X, 2.0), {}, [X]),
    "default_passed_by_keyword": (DEFAULT, (X,), {"scale": 2.0}, [X]),
    "keyword_only": (KEYWORD, (X,), {"y": Y}, [X, Y]),
    "variadic": (VARIADIC, (X, Y), {"z": Z}, [X, Y, Z]),
    "nested": (NESTED, ({"a": [X, None], "b": (Y,)},), {}, [X, Y]),
    "named_tuple": ([parameter("x", pair("namedtuple", leaf(0), leaf(1)))], (Pair(X, Y),), {}, [X, Y]),
    "dataclass": ([parameter("x", pair("dataclass", leaf(0), leaf(1)))], (Record(X, Y),), {}, [X, Y]),
    "mapping_with_the_fields": (
        [parameter("x", pair("model_output", leaf(0), leaf(1)))],
        (collections.OrderedDict(first=X, second=Y),),
        {},
        [X, Y],
    ),
    "same_tensor_twice": ([parameter("x", leaf(0)), parameter("y", leaf(0))], (X, X), {}, [X]),
    "size": ([parameter("s", sequence("size", constant(2), constant(3)))], (torch.Size([2, 3]),), {}, []),
    "nan": ([parameter("s", constant(float("nan")))], (float("nan"),), {}, []),
    "cpu_of_an_index": ([parameter("s", constant(torch.device("cpu")))], (torch.device("cpu:0"),), {}, []),
}


@pytest.mark.parametrize(("parameters", "args", "kwargs", "expected"), FITTING.values(), ids=FITTING)
def test_call_that_fits_is_flattened(parameters, args, kwargs, expected):
    leaves, violations = flatten(parameters, args, kwargs)
    assert violations == []
    assert [id(value) for value in leaves] == [id(value) for value in [*expected, *[None] * (4 - len(expected))]]


UNFITTING = {
    "no_array": (
        [parameter("x", Leaf(index=0, array=True))],
        (3,),
        {},
        ["`x`: expected an array, as at capture; 3 is no `numpy.ndarray`"],
    ),
    "long": (DEFAULT, (X, "a" * 99), {}, ["`scale`: expected 2.0, as at capture, got '" + "a" * 79]),
    "missing": (PLAIN, (X,), {}, ["`y`: missing; it was passed at capture"]),
    "all_missing": (
        PLAIN,
        (),
        {},
        ["`x`: missing; it was passed at capture", "`y`: missing; it was passed at capture"],
    ),
    "missing_keyword": (KEYWORD, (X,), {}, ["`y`: missing; it was passed at capture"]),
    "too_many": (PLAIN, (X, Y, Z), {}, ["takes 2 positional arguments (`x`, `y`), got 3"]),
    "keyword_only_by_position": (
        KEYWORD,
        (X, Y),
        {},
        ["takes 1 positional arguments (`x`), got 2", "`y`: missing; it was passed at capture"],
    ),
    "unexpected": (PLAIN, (X, Y), {"z": Z}, ["`z`: unexpected keyword argument; there are `x`, `y`"]),
    "twice": (PLAIN, (X, Y), {"x": X}, ["`x`: passed twice"]),
    "positional_only_by_keyword": (
        POSITIONAL,
        (),
        {"x": X, "y": Y},
        ["`x`: unexpected keyword argument; there are `x`, `y`", "`x`: missing; it was passed at capture"],
    ),
    "none": (PLAIN, (X,), {"y": None}, ["`y`: expected a tensor or number, got None"]),
    "constant_changed": (DEFAULT, (X, 3.0), {}, ["`scale`: expected 2.0, as at capture, got 3.0"]),
    "constant_of_another_type": (DEFAULT, (X, 2), {}, ["`scale`: expected 2.0, as at capture, got 2"]),
    "tensor_in_place_of_none": (
        NESTED,
        ({"a": [X, Y], "b": (Y,)},),
        {},
        ["`x['a'][1]`: expected None, as at capture, got a tensor float32[3]"],
    ),
    "other_keys": (
        NESTED,
        ({"a": [X, None]},),
        {},
        ["`x`: expected a dict with keys ['a', 'b'] in this order; missing: 'b'"],
    ),
    "other_order": (
        NESTED,
        ({"b": (Y,), "a": [X, None]},),
        {},
        ["`x`: expected a dict with keys ['a', 'b'] in this order, got a dict with keys ['b', 'a']"],
    ),
    "tensor_in_place_of_a_dict": (
        NESTED,
        (X,),
        {},
        ["`x`: expected a dict with keys ['a', 'b'] in this order, got a tensor float32[2]"],
    ),
    "tuple_in_place_of_a_list": (
        NESTED,
        ({"a": (X, None), "b": (Y,)},),
        {},
        ["`x['a']`: expected a list of 2, got a tuple of 2"],
    ),
    "other_length": (
        NESTED,
        ({"a": [X], "b": ()},),
        {},
        ["`x['a']`: expected a list of 2, got a list of 1", "`x['b']`: expected a tuple of 1, got a tuple of 0"],
    ),
    "more_variadic_arguments": (VARIADIC, (X, Y, Z), {"z": Z}, ["`rest`: expected a tuple of 1, got a tuple of 2"]),
    "other_variadic_keywords": (
        VARIADIC,
        (X, Y),
        {"w": Z},
        ["`more`: expected a dict with keys ['z'] in this order; missing: 'z'; unexpected: 'w'"],
    ),
    "keys_in_any_order_others": (
        BY_KEY,
        ({"c": X, "b": Y, "d": Z},),
        {},
        ["`x`: expected a dict with keys ['a', 'b'] in any order; missing: 'a'; unexpected: 'c', 'd'"],
    ),
    "keys_in_any_order_more": (
        BY_KEY,
        ({"c": X, "b": Y, "a": Z},),
        {},
        ["`x`: expected a dict with keys ['a', 'b'] in any order; unexpected: 'c'"],
    ),
    "keys_in_any_order_no_dict": (
        BY_KEY,
        (X,),
        {},
        ["`x`: expected a dict with keys ['a', 'b'] in any order, got a tensor float32[2]"],
    ),
    "keys_of_keywords_in_any_order": (
        [parameter("more", mapping(a=leaf(0), b=leaf(1), any_order=True), "var_keyword")],
        (),
        {"c": X, "b": Y},
        ["`more`: expected a dict with keys ['a', 'b'] in any order; missing: 'a'; unexpected: 'c'"],
    ),
    "field_missing": (
        [parameter("x", pair("dataclass", leaf(0), leaf(1)))],
        ({"first": X},),
        {},
        ["`x`: expected a `Pair` with fields first, second, got a dict with keys ['first']"],
    ),
    "other_tensor_where_it_was_the_same": (
        [parameter("x", leaf(0)), parameter("y", leaf(0))],
        (X, Y),
        {},
        ["`y`: at capture another argument was the very same tensor; pass the same one"],
    ),
    "none_where_it_was_the_same": (
        [parameter("x", leaf(0)), parameter("y", leaf(0))],
        (None, Y),
        {},
        ["`x`: expected a tensor or number, got None"],
    ),
}


@pytest.mark.parametrize(("parameters", "args", "kwargs", "expected"), UNFITTING.values(), ids=UNFITTING)
def test_call_that_does_not_fit_is_told_every_violation(parameters, args, kwargs, expected):
    assert flatten(parameters, args, kwargs)[1] == expected


@pytest.mark.parametrize("dict_type", [dict, collections.OrderedDict, collections.UserDict])
def test_dict_that_is_read_by_key_fits_in_any_order(dict_type):
    leaves, violations = flatten(BY_KEY, (dict_type({"b": Y, "a": X}),), {})
    assert violations == []
    assert leaves[0] is X
    assert leaves[1] is Y


def test_keywords_that_are_read_by_key_fit_in_any_order():
    more = parameter("more", mapping(a=leaf(0), b=leaf(1), any_order=True), "var_keyword")
    leaves, violations = flatten([more], (), {"b": Y, "a": X})
    assert violations == []
    assert leaves[:2] == [X, Y]
