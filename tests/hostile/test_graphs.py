"""Graphs: no single static assignment, references to nothing, arguments that no operator takes."""

import pytest

from aotexport_runtime import BundleInvalid, Limits
from tests.hostile.crafted import Crafted

WHERE = "programs/train/forward.json"
RELU = "aten::relu.default"
TENSOR = {"kind": "tensor", "dtype": "float32", "shape": [], "stride": []}


NODES = [
    ({"op": RELU, "args": ["crafted"]}, "value 'crafted' is used before it is defined"),
    ({"op": RELU, "args": ["nothing"]}, "value 'nothing' is used before it is defined"),
    ({"op": RELU, "args": [[["nothing"]]]}, "value 'nothing' is used before it is defined"),
    ({"op": RELU, "kwargs": {"self": "nothing"}}, "value 'nothing' is used before it is defined"),
    ({"op": RELU, "args": [{"kind": "slice", "start": "nothing"}]}, "value 'nothing' is used before it is defined"),
    ({"op": RELU, "name": "linear"}, "value 'linear' is defined twice"),
    ({"op": RELU, "name": "input:x"}, "value 'input:x' is defined twice"),
    ({"op": RELU, "args": [{"kind": "subgraph", "name": "body"}]}, "no subgraph 'body'"),
    ({"op": RELU, "args": [-(1 << 64)]}, "an integer argument has more than 64 bits"),
    ({"op": RELU, "args": [{"kind": "slice", "stop": 1 << 64}]}, "an integer argument has more than 64 bits"),
    (
        {"op": RELU, "args": [{"kind": "layout", "value": "sparse_coo"}]},
        "Invalid enum value 'sparse_coo' - at `$.nodes[7].args[0].value`",
    ),
    (
        {"op": RELU, "args": [{"kind": "device", "type": "meta"}]},
        "Invalid enum value 'meta' - at `$.nodes[7].args[0].type`",
    ),
    ({"op": RELU, "source": 99}, "`Node.source` is 99, out of range(3)"),
    ({"op": RELU, "meta": {**TENSOR, "stride": [1]}}, "a tensor has 0 sizes and 1 strides; at most 64 are read"),
    (
        {"op": RELU, "meta": {**TENSOR, "shape": [1] * 65, "stride": [1] * 65}},
        "a tensor has 65 sizes and 65 strides; at most 64 are read",
    ),
    (
        {"op": RELU, "meta": {"kind": "sequence", "items": [{**TENSOR, "offset": {"op": "not", "args": ["s9"]}}]}},
        "unknown symbol 's9' in a size",
    ),
    ({"op": RELU, "kwargs": {"x=print()": 1}}, "operator `aten::relu.default` has a malformed keyword 'x=print()'"),
    ({"op": RELU, "kwargs": {"class": 1}}, "operator `aten::relu.default` has a malformed keyword 'class'"),
    ({"op": RELU, "kwargs": {"": 1}}, "operator `aten::relu.default` has a malformed keyword ''"),
    ({"op": RELU, "kwargs": {"\u0430": 1}}, "operator `aten::relu.default` has a malformed keyword '\u0430'"),
]


@pytest.mark.parametrize(("node", "message"), NODES, ids=[message[:60] for _, message in NODES])
def test_node_with_a_fault_is_refused(crafted: Crafted, node, message):
    crafted.node("forward", **node)
    assert crafted.refusal() == f"{WHERE}: {message}"


def test_graph_input_that_is_named_twice_is_refused(crafted: Crafted):
    crafted.put("forward", "inputs/1/name", "parameter:linear.weight")
    assert crafted.refusal() == f"{WHERE}: value 'parameter:linear.weight' is defined twice"


@pytest.mark.parametrize("output", ["nothing", ["nothing"]])
def test_output_that_is_not_defined_is_refused(crafted: Crafted, output):
    crafted.put("forward", "outputs/0", output)
    assert crafted.refusal() == f"{WHERE}: value 'nothing' is used before it is defined"


def test_argument_that_is_nested_deeper_than_any_operator_takes_is_refused(crafted: Crafted):
    crafted.node("forward", op=RELU, args=[[[[[1]]]]])
    message = "Expected `bool | int | float | str | object | null`, got `array` - at `$.nodes[7].args[0][0][0][0]`"
    assert crafted.refusal() == f"{WHERE}: {message}"


def test_subgraph_is_checked_like_a_graph_and_sees_none_of_its_values(crafted: Crafted):
    nodes = [{"name": "y", "op": RELU, "args": ["linear"], "meta": TENSOR}]
    crafted.put("forward", "subgraphs/body", {"inputs": [], "nodes": nodes, "outputs": ["y"]})
    with pytest.raises(BundleInvalid) as caught:
        crafted.read()
    assert str(caught.value) == f"{WHERE}: value 'linear' is used before it is defined"
    assert (caught.value.code, caught.value.path) == ("value-undefined", "$.subgraphs.body.nodes[0].args[0]")


def test_graph_of_an_unreasonable_number_of_nodes_is_refused(crafted: Crafted):
    with pytest.raises(BundleInvalid) as caught:
        crafted.read(Limits(nodes=6))
    assert str(caught.value) == f"{WHERE}: 7 nodes; at most 6 are read"
