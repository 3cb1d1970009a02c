"""What runs of a training step: updates by torch's fused operator, cheap values computed again."""

import pytest
import torch
from msgspec.structs import replace

from aotexport_runtime.execution import updates
from aotexport_runtime.rewrite.recompute import computed_again
from aotexport_runtime.rewrite.updates import UPDATE, with_fused_updates
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import TensorMeta


@pytest.mark.parametrize(
    ("dtype", "rate", "transposed"),
    [
        (torch.float32, 1e-2, False),
        (torch.float64, 1e-2, False),
        (torch.bfloat16, 1e-2, False),
        (torch.float64, 1e-2, True),
        (torch.float64, 0.0, False),
    ],
)
def test_updates_are_those_of_torch(dtype, rate, transposed):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 5).to(dtype))
    optimizer = torch.optim.AdamW([parameter], lr=rate, weight_decay=0.1)
    own, mean, square = (each.to(dtype) for each in (parameter.detach().clone(), torch.zeros(3, 5), torch.zeros(3, 5)))
    for count in range(1, 4):
        parameter.grad = torch.randn(5, 3).to(dtype).t() if transposed else torch.randn(3, 5).to(dtype)
        optimizer.step()
        size = -torch.tensor(rate, dtype=torch.float64) / (1 - 0.9**count)
        divisor, addend = size * (1 - 0.999**count) ** 0.5, 1e-8 / size
        versions = [each._version for each in (own, mean, square)]
        decay = torch.tensor(1 - rate * 0.1)
        assert updates.adam(own, parameter.grad, mean, square, 1 - 0.9, 0.999, decay, divisor, addend) is own
        torch.testing.assert_close(own, parameter.detach())
        torch.testing.assert_close([mean, square], [optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq")])
        assert all(each._version > before for each, before in zip((own, mean, square), versions, strict=True))


def _node(name, op, *args):
    meta = TensorMeta(shape=(4, 4), stride=(4, 1), dtype="float32")
    return Node(name=name, op=f"aten::{op}", args=list(args), meta=meta)


@pytest.mark.parametrize(
    ("backward", "again"),
    [
        ([_node("one", "mm.default", "v", "x"), _node("two", "gelu_backward.default", "one", "h")], True),
        ([_node("one", "mm.default", "v", "x"), _node("two", "neg.default", "one")], False),
        ([_node("one", "add_.Tensor", "h", 1), _node("two", "mm.default", "v", "h")], False),
        (
            [_node("w", "t.default", "h"), _node("one", "add_.Tensor", "w", 1), _node("two", "mm.default", "v", "h")],
            False,
        ),
        ([_node("one", "add_.Tensor", "g", 1), _node("two", "mm.default", "v", "h")], False),
    ],
)
def test_values_are_computed_again_of_what_backward_reads_later(backward, again):
    forward = [
        _node("h", "mm.default", "x", "x"),
        _node("g", "gelu.default", "h"),
        _node("v", "view.default", "g", [16]),
    ]
    made = computed_again([*forward, loss := _node("loss", "sum.default", "v"), *backward], "loss")
    names = [node.name for node in made]
    assert names == ["h", "g", "v", loss.name, *["g:again", "v:again"] * again, *(node.name for node in backward)]
    assert made[-2].args[0] == ("v:again" if again else backward[-2].args[0])


def test_an_update_of_which_a_number_is_read_between_stays_as_it_is():
    update = [
        _node("decayed", "mul_.Tensor", "p", "kept"),
        _node("mean", "lerp_.Scalar", "m", "g", 0.1),
        _node("scaled", "mul_.Tensor", "v", 0.99),
        replace(_node("square", "addcmul_.default", "scaled", "g", "g"), kwargs={"value": 1 - 0.99}),
        _node("root", "sqrt.default", "square"),
        _node("over", "div.Tensor", "root", "divisor"),
        _node("plus", "add_.Tensor", "over", "addend"),
        _node("updated", "addcdiv_.default", "decayed", "mean", "plus"),
    ]
    for read, count in (("rate", 2), ("p", 9), ("m", 9)):
        number = replace(_node("number", "sum.default", read), meta=TensorMeta(shape=(), stride=(), dtype="float32"))
        made = with_fused_updates(Graph(inputs=[], nodes=[update[0], number, *update[1:]], outputs=["number"]))
        assert len(made) == count
    (_, fused) = with_fused_updates(Graph(inputs=[], nodes=[_node("x", "neg.default", "g"), *update], outputs=[]))
    assert (fused.op, fused.args) == (UPDATE, ["p", "g", "m", "v", 0.1, 0.99, "kept", "divisor", "addend"])
