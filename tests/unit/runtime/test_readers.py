"""Uses of weights: of which operators an adapter can change the result."""

from types import SimpleNamespace

import pytest

from aotexport_runtime.engines.forward.readers import OPERATORS, Readers, _operands
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.program import StateInput
from aotexport_runtime.schema.values import NothingMeta


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "changes"),
    [
        ("aten::linear.default", ["x", "w", "b"], {}, True),
        ("aten::linear.default", ["w", "x"], {}, False),
        ("aten::linear.default", ["w", "w"], {}, False),
        ("aten::addmm.default", ["b", "x", "w"], {}, True),
        ("aten::addmm.default", ["b", "x", "w"], {"beta": 2}, False),
        ("aten::mm.default", ["x", "w"], {}, True),
        ("aten::matmul.default", ["x", "w"], {}, True),
        ("aten::embedding.default", ["w", "x"], {}, True),
        ("aten::conv2d.default", ["x", "w"], {"groups": 1}, True),
        ("aten::mul.Tensor", ["x", "w"], {}, False),
    ],
)
def test_operators_are_adapted_where_they_read_a_weight_alone(op, args, kwargs, changes):
    node = Node(name="y", op=op, args=args, kwargs=kwargs, meta=NothingMeta())
    assert _operands(node, "w") is (OPERATORS[op] if changes else None)


LINEAR = [("linear", ["x", "weight", "bias"])]
PRODUCT = [("mm", ["x", "weight"])]


@pytest.mark.parametrize(
    ("calls", "others", "is_layer"),
    [
        (LINEAR, [], True),
        ([("t", ["weight"]), ("mm", ["x", "c0"]), ("add.Tensor", ["c1", "bias"])], [], True),
        ([*PRODUCT, ("view", ["c0", [4]])], [], True),
        ([*PRODUCT, ("add.Tensor", ["c0", "x"])], [], False),
        ([*PRODUCT, ("softmax.int", ["c0", 1])], [], False),
        ([*PRODUCT, ("mm", ["c0", "weight"])], [], False),
        ([*PRODUCT, ("view", ["c0", [4]]), ("mm", ["c1", "weight"])], [], False),
        (LINEAR, ["layer.scale"], False),
        (LINEAR, ["other.scale"], True),
    ],
)
def test_module_that_multiplies_by_its_weight_and_adds_its_bias_alone_is_a_layer(calls, others, is_layer):
    names = ["layer.weight", "layer.bias", *others]
    values = [GraphInput(name=name, meta=NothingMeta()) for name in ("weight", "bias", *others, "x")]
    nodes = [
        Node(
            name=f"c{place}",
            op=f"aten::{op}" if "." in op else f"aten::{op}.default",
            args=args,
            meta=NothingMeta(),
            module=0,
        )
        for place, (op, args) in enumerate(calls)
    ]
    graph = Graph(inputs=tuple(values), nodes=tuple(nodes), outputs=[nodes[-1].name], modules=("layer",))
    readers = Readers(
        graph, SimpleNamespace(inputs=[*(StateInput(name=name, meta=NothingMeta()) for name in names), None])
    )
    assert readers.is_layer("layer.weight") is is_layer
    assert not readers.is_layer("layer.bias")
