"""Uses of weights: of which operators an adapter can change the result."""

import pytest

from aotexport_runtime.engines.forward.readers import OPERATORS, _operands
from aotexport_runtime.schema.graph import Node
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
