"""Records: JSON keeps every argument to the bit, and constants come back as the Python values they were."""

import math
from typing import Any, get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.schema.codec import decode_record, encode_record, nesting
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.schema.values import (
    ComplexArgument,
    DeviceArgument,
    DeviceClass,
    DTypeArgument,
    FloatArgument,
    MemoryFormatArgument,
    SizeArgument,
    SliceArgument,
    StringArgument,
    SubgraphArgument,
)
from aotexport_runtime.values.structure import encode_constant
from tests.property.profile import quick

text = st.text(max_size=12)
integers = st.integers(-(1 << 63), (1 << 63) - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
special = st.sampled_from(["inf", "-inf", "nan"]).map(lambda value: FloatArgument(value=value))
bound = st.none() | integers | text
elements = st.one_of(
    *(st.none(), st.booleans(), integers, finite, text, special),
    text.map(lambda value: StringArgument(value=value)),
    st.builds(lambda re, im: ComplexArgument(real=re, imag=im), finite | special, finite | special),
    st.sampled_from(["bool", "float32", "complex128"]).map(lambda value: DTypeArgument(value=value)),
    st.sampled_from(get_args(DeviceClass)).map(lambda value: DeviceArgument(type=value)),
    st.just(MemoryFormatArgument(value="channels_last")),
    st.builds(lambda a, b: SizeArgument(value=SizeExpression(op="add", args=(a, b))), integers | text, integers | text),
    text.map(lambda name: SubgraphArgument(name=name)),
    st.builds(lambda a, b, c: SliceArgument(start=a, stop=b, step=c), bound, bound, bound),
)
arguments = elements | st.lists(elements | st.lists(elements | st.lists(elements, max_size=3), max_size=3), max_size=3)


@quick
@given(st.lists(arguments, max_size=4))
def test_arguments_survive_json_to_the_bit_and_always_in_the_same_bytes(outputs):
    graph = Graph(inputs=(), nodes=(), outputs=outputs)
    data = encode_record(graph)
    decoded = decode_record(data, Graph, where="test")
    # `repr` tells 1 from 1.0 from True, and -0.0 from 0.0.
    assert repr(decoded) == repr(graph)
    assert encode_record(decoded) == data


constants = st.one_of(
    *(st.none(), st.booleans(), integers, st.floats(), st.complex_numbers(), text),
    st.sampled_from([torch.float32, torch.bool, torch.strided, torch.channels_last, torch.device("cpu")]),
)


@quick
@given(constants)
def test_constant_comes_back_as_the_value_that_it_was(value):
    again = constant_value(encode_constant(value), Environment())
    assert type(again) is type(value)
    assert _spelled(again) == _spelled(value)


def _spelled(value: Any) -> Any:
    if isinstance(value, complex):
        return _spelled(value.real), _spelled(value.imag)
    return "nan" if isinstance(value, float) and math.isnan(value) else repr(value)


json_values = st.recursive(
    st.none() | st.integers(0, 9) | st.text('[]{}"\\:ab', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\', max_size=3), inner, max_size=3),
    max_leaves=12,
)


@quick
@given(json_values)
def test_nesting_of_json_is_that_of_its_containers_whatever_its_strings_hold(value):
    import json

    def depth(value: Any) -> int:
        items = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(map(depth, items), default=0) if isinstance(items, list) else 0

    def containers(value: Any) -> int:
        items = list(value.values()) if isinstance(value, dict) else value
        return 1 + sum(map(containers, items)) if isinstance(items, list) else 0

    def values(value: Any) -> int:
        items = list(value.values()) if isinstance(value, dict) else value
        return 1 + (sum(map(values, items)) if isinstance(items, list) else 0)

    def empty(value: Any) -> int:
        items = list(value.values()) if isinstance(value, dict) else value
        return isinstance(items, list) and (sum(map(empty, items)) if items else 1)

    def keys(value: Any) -> int:
        items = list(value.values()) if isinstance(value, dict) else value
        return (len(value) if isinstance(value, dict) else 0) + (
            sum(map(keys, items)) if isinstance(items, list) else 0
        )

    found = nesting(json.dumps(value).encode())
    assert found == (depth(value), containers(value), values(value) - 1 + empty(value), keys(value))
