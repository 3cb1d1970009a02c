"""What the engine of functional graphs leaves out and writes over; each line runs beside the line as it was given."""

import math

import msgspec
import pytest
import torch

from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.execution.codegen import Environment, compile_graph
from aotexport_runtime.execution.dropout import DROPOUTS
from aotexport_runtime.execution.functional_graph import of_proven_dtype
from aotexport_runtime.execution.ops import resolve
from aotexport_runtime.rewrite import reuse
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.rewrite.reuse import reusing
from aotexport_runtime.rewrite.simplify import simplified
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.values import SequenceMeta, TensorMeta

SQUARE = TensorMeta(dtype="float32", shape=(3, 3), stride=(3, 1))
TURNED = TensorMeta(dtype="float32", shape=(3, 3), stride=(1, 3))
ROW = TensorMeta(dtype="float32", shape=(1, 3), stride=(3, 1))
FLAT = TensorMeta(dtype="float32", shape=(3,), stride=(1,))
LONG = TensorMeta(dtype="float32", shape=(9,), stride=(1,))
EVERY = frozenset("abcdefghijklmnopqrstuvwxyz")


def node(name, op, *args, meta=SQUARE, **kwargs):
    return Node(name=name, op=f"aten::{op}", args=list(args), kwargs=kwargs, meta=meta)


def line(*nodes, outputs):
    return Subgraph(["x", "y"], list(nodes), outputs)


def metas():
    return {"x": SQUARE, "y": SQUARE}


def run(piece):
    graph = Graph(inputs=tuple(GraphInput(name=name, meta=SQUARE) for name in "xy"), nodes=(), outputs=[])
    function = compile_graph(graph, piece.nodes, piece.inputs, piece.outputs, Environment())
    x = torch.linspace(-2, 2, 9).reshape(3, 3)
    y = torch.linspace(1, 3, 9).reshape(3, 3)
    before = x.clone(), y.clone()
    results = function([x, y], {})
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    return results


def same_results(before, after):
    expected, got = run(before), run(after)
    assert [(a.shape, a.stride()) for a in expected] == [(a.shape, a.stride()) for a in got]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert len({id(tensor) for tensor in got}) == len({id(tensor) for tensor in expected})


# --- simplified -------------------------------------------------------------------------------------------

TWICE = (node("a", "relu.default", "x"), node("b", "t.default", "a", meta=TURNED), node("c", "t.default", "b"))
SAME = (node("a", "exp.default", "x"), node("b", "detach.default", "a"), node("c", "detach.default", "a"))
LAYER = (node("a", "t.default", "y", meta=TURNED), node("b", "select.int", "x", 0, 0, meta=FLAT))
ZEROS = (node("a", "new_zeros.default", "x", [3, 3]), node("b", "select.int", "x", 0, 0, meta=FLAT))
SIMPLIFIED = [
    ((*TWICE, node("d", "mm.default", "c", "y")), "d", ["relu.default", "mm.default"]),
    (TWICE, "c", ["relu.default"]),
    (
        (node("a", "detach.default", "x"), node("b", "view.default", "a", [3, -1]), node("c", "exp.default", "b")),
        "c",
        ["assumed::shape", "exp.default"],
    ),
    (
        (node("a", "view.default", "x", [9], meta=LONG), node("b", "exp.default", "a", meta=LONG)),
        "b",
        ["reshape.default", "exp.default"],
    ),
    (SAME, "ab", ["exp.default", "detach.default"]),
    (SAME, "bc", ["exp.default", "detach.default"]),
    ((node("b", "detach.default", "x"),), "b", ["detach.default"]),
    ((*ZEROS, node("c", "add.Tensor", "b", "a")), "c", ["new_zeros.default", "select.int", "add.Tensor"]),
    ((*LAYER, node("c", "addmm.default", "b", "x", "a")), "c", ["select.int", "linear.default"]),
    ((*LAYER, node("c", "addmm.default", "y", "x", "a")), "c", ["t.default", "select.int", "addmm.default"]),
]


@pytest.mark.parametrize(("nodes", "outputs", "ops"), SIMPLIFIED)
def test_nodes_that_change_nothing_are_left_out_and_outputs_stay_as_many_tensors(nodes, outputs, ops):
    before = line(*nodes, outputs=[*outputs])
    after = simplified(before, metas(), EVERY)
    assert [n.op.removeprefix("aten::") for n in after.nodes] == ops
    same_results(before, after)


def test_a_view_that_is_left_out_by_false_metadata_refuses_the_call():
    turned = node("a", "mm.default", "y", "x", meta=TensorMeta(dtype="float32", shape=(1, 9), stride=(9, 1)))
    flat = TensorMeta(dtype="float32", shape=(1, 9), stride=(9, 1))
    after = simplified(line(turned, node("b", "view.default", "a", [1, 9], meta=flat), outputs=["b"]), metas(), EVERY)

    with pytest.raises(
        BundleInvalid, match=r"a value of a graph has the shape \[3, 3\], and its metadata say \[1, 9\]"
    ):
        run(after)


def test_only_dtypes_that_follow_from_those_of_inputs_are_proven():
    batch = SequenceMeta(items=(SQUARE, FLAT, FLAT))
    nodes = (
        node("a", "relu.default", "x"),
        node("b", "unfold_backward.default", "a", [3, 3], 0, 1, 1),
        node("c", "add.Tensor", "a", "b"),
        node("d", "add.Tensor", "a", "a"),
        node("e", "native_layer_norm.default", "d", [3], None, None, 1e-5, meta=batch),
        Node(name="f", op="python::getitem", args=["e", 0], meta=SQUARE),
        node("g", "arange.default", 3, meta=msgspec.structs.replace(FLAT, dtype="int64")),
        node("h", "arange.default", 3, meta=FLAT),
    )
    values = {**metas(), **{each.name: each.meta for each in nodes}}
    assert of_proven_dtype("xy", nodes, values) == {"x", "y", "a", "d", "e", "f", "g"}


@pytest.mark.parametrize("p", [0, 0.3, 1])
@pytest.mark.parametrize("turned", [False, True])
def test_dropout_gives_the_numbers_of_torchs(p, turned):
    x = torch.tensor([[math.nan, math.inf, -0.0], [1, 2, 3]]).repeat(9, 7)
    x = x.t() if turned else x
    for train in (None, True, False):
        state = torch.manual_seed(0).get_state()
        (expected, mask), after = torch.native_dropout(x, p, train), torch.get_rng_state()
        torch.set_rng_state(state)
        found = DROPOUTS["aten::native_dropout.default"](x, p, train)
        torch.testing.assert_close(found, (expected, mask), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.get_rng_state(), after)
    for scale in (0.0, 1 / 0.7):
        expected = torch.ops.aten.native_dropout_backward.default(x, mask, scale)
        found = DROPOUTS["aten::native_dropout_backward.default"](x, mask, scale)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_an_operand_whose_dtype_is_not_proven_is_not_written_over():
    nodes = (node("a", "exp.default", "x"), node("b", "relu.default", "a"))
    after = reusing(line(*nodes, outputs=["b"]), EVERY - {"a"}, visible=1)
    assert [n.op for n in after.nodes] == ["aten::exp.default", "aten::relu.default"]


# --- reusing ----------------------------------------------------------------------------------------------

A, B = node("a", "exp.default", "x"), node("b", "relu.default", "a")
SHOWN = node("v", "view.default", "a", [9], meta=LONG)
TURN = node("v", "t.default", "a", meta=TURNED)
OF_TURN = node("b", "relu.default", "v", meta=TURNED)
EVERY_SECOND = node("v", "slice.Tensor", "a", 0, 1, 2, meta=ROW)
STATISTICS = SequenceMeta(items=(SQUARE, ROW, ROW))
ITEMS = (
    node("s", "native_layer_norm.default", "x", [3], None, None, 1e-5, meta=STATISTICS),
    Node(name="a", op="python::getitem", args=["s", 0], meta=SQUARE),
    Node(name="m", op="python::getitem", args=["s", 1], meta=ROW),
    B,
)
AGAIN = Node(name="again", op="python::getitem", args=["s", 0], meta=SQUARE)

OVER = {
    "a dead operand is": ((A, B), "b", "exp relu_"),
    "inputs are not": ((node("a", "relu.default", "x"),), "a", "relu"),
    "views of inputs are not": (
        (node("v", "t.default", "x", meta=TURNED), node("a", "relu.default", "v", meta=TURNED)),
        "a",
        "t relu",
    ),
    "what is used later is not": ((A, B, node("c", "mm.default", "a", "b")), "c", "exp relu mm"),
    "what is returned is not": ((A, B), "ab", "exp relu"),
    "what a returned view shows is not": ((A, SHOWN, B), "bv", "exp view relu"),
    "what an unknown operator may share is not": (
        (A, EVERY_SECOND, B, node("c", "exp.default", "v", meta=ROW)),
        "bc",
        "exp slice relu exp",
    ),
    "a part of an input is not": (
        (node("a", "slice.Tensor", "x", 0, 1, 2, meta=ROW), node("b", "relu.default", "a", meta=ROW)),
        "b",
        "slice relu",
    ),
    "an operand that stands twice is not": ((A, node("b", "mul.Tensor", "a", "a")), "b", "exp mul"),
    "what is subtracted is not": ((A, node("b", "sub.Tensor", "y", "a")), "b", "exp sub"),
    "what is scaled is not": ((A, node("b", "add.Tensor", "y", "a", alpha=2)), "b", "exp add"),
    "an operand of another layout is not": (
        (node("a", "sum.dim_IntList", "x", [0], True, meta=ROW), node("b", "add.Tensor", "a", "y")),
        "b",
        "sum add",
    ),
    "a view that the caller sees is not": ((A, TURN, OF_TURN), "b", "exp t relu"),
    "either operand of a backward operator is": (
        (A, node("b", "threshold_backward.default", "y", "a", 0)),
        "b",
        "exp threshold_backward",
    ),
    "an item of several results is": (ITEMS, "bm", "native_layer_norm getitem getitem relu_"),
    "an item that is taken twice is not": (
        (*ITEMS, AGAIN),
        ["b", "again"],
        "native_layer_norm getitem getitem relu getitem",
    ),
}


def over(nodes, outputs, ops, visible=None):
    before = line(*nodes, outputs=[*outputs])
    after = reusing(before, EVERY, visible=len(outputs) if visible is None else visible)
    assert " ".join(n.op.partition("::")[2].partition(".")[0] for n in after.nodes) == ops
    same_results(before, after)
    return after


@pytest.mark.parametrize(("nodes", "outputs", "ops"), OVER.values(), ids=OVER)
def test_operand_is_written_over_where_nothing_can_see_it(nodes, outputs, ops):
    over(nodes, outputs, ops)


def test_a_view_that_the_caller_does_not_see_is_written_over():
    over((A, TURN, OF_TURN), "b", "exp t relu_", visible=0)


def test_backward_operator_writes_into_an_operand_by_name():
    after = over(*OVER["either operand of a backward operator is"])
    assert after.nodes[-1].op == "aten::threshold_backward.grad_input"


@pytest.mark.parametrize(
    ("probability", "train", "written"), [(0.5, True, True), (0.0, True, False), (0.5, False, False)]
)
def test_a_dropout_that_may_return_its_operand_is_no_fresh_memory(probability, train, written):
    masked = SequenceMeta(items=(SQUARE, TensorMeta(dtype="bool", shape=(3, 3), stride=(3, 1))))
    before = line(
        node("s", "native_dropout.default", "x", probability, train, meta=masked),
        Node(name="a", op="python::getitem", args=["s", 0], meta=SQUARE),
        node("b", "relu.default", "a"),
        outputs=["b"],
    )
    after = reusing(before, EVERY, visible=1)
    assert after.nodes[-1].op == ("aten::relu_.default" if written else "aten::relu.default")


# --- tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(reuse.FRESH))
def test_fresh_operators_declare_no_alias(name):
    operator = resolve(name, None, frozenset())
    assert all(returned.alias_info is None for returned in operator._schema.returns)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: TID251 (what autograd itself goes by)
    composite = has_kernel(name.removesuffix(".default"), "CompositeImplicitAutograd")
    assert not composite or has_kernel(name.removesuffix(".default"), "CPU")
