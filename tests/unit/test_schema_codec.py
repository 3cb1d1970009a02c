"""Records to canonical bytes and back: strict, lossless, the same bytes for the same record."""

import pytest

from aotexport.write.files import min_reader
from aotexport_runtime.schema.codec import as_written, decode_record, encode_record
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.manifest import Manifest, Producer, ProgramEntry
from aotexport_runtime.schema.program import ForwardGraph, Program
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping
from aotexport_runtime.schema.values import (
    DTypeArgument,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    SliceArgument,
    StringArgument,
    TensorMeta,
)

TENSOR = TensorMeta(dtype="float32", shape=(2, "s0"), stride=(SizeExpression(op="add", args=("s0", 1)), 1))
NODE = Node(
    name="sum",
    op="aten::sum.dim_IntList",
    args=["x", [0, 1], True, 0.5, None, [["x", StringArgument(value="x")]]],
    kwargs={
        "dtype": DTypeArgument(value="float64"),
        "slice": SliceArgument(start="n", step=2),
        "other": SizeArgument(value="s0"),
    },
    meta=SequenceMeta(items=(TENSOR, SizeMeta())),
    source=0,
)
GRAPH = Graph(inputs=(GraphInput(name="x", meta=TENSOR),), nodes=(NODE,), outputs=["sum", None, 3])
PROGRAM = Program(
    name="train",
    mode="train",
    grad=True,
    parameters=(),
    inputs=(),
    outputs=(TENSOR, None),
    output_tree=Mapping(type="dict", keys=("a", 1, None, True), items=(*[Leaf(index=0)] * 3, Constant(value=2.5))),
    forward=ForwardGraph(file="forward.json"),
)
MANIFEST = Manifest(
    format="1.0",
    min_reader="1.0",
    calling_convention=1,
    producer=Producer(aotexport="0.1.0", torch="2.13.0"),
    name="Netz → ü",
    kind="module",
    programs=(ProgramEntry(name="train"),),
    files=(),
)


@pytest.mark.parametrize("record", [GRAPH, PROGRAM, MANIFEST], ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("indent", [True, False])
def test_record_through_json_is_equal_and_gives_the_same_bytes(record, indent):
    data = encode_record(record, indent=indent)
    decoded = decode_record(data, type(record), where="x")
    assert decoded == record
    assert encode_record(decoded, indent=indent) == data


def test_bytes_of_a_record_are_canonical():
    assert encode_record(GRAPH, indent=False).decode() == (
        '{"inputs":[{"meta":0,"name":"x"}],'
        '"metas":[{"dtype":"float32","kind":"tensor","shape":[2,"s0"],"stride":[{"args":["s0",1],"op":"add"},1]},'
        '{"items":[{"dtype":"float32","kind":"tensor","shape":[2,"s0"],'
        '"stride":[{"args":["s0",1],"op":"add"},1]},{"kind":"size"}],"kind":"sequence"}],'
        '"nodes":[{"args":["x",[0,1],true,0.5,null,[["x",{"kind":"string","value":"x"}]]],'
        '"kwargs":{"dtype":{"kind":"dtype","value":"float64"},"other":{"kind":"size","value":"s0"},'
        '"slice":{"kind":"slice","start":"n","step":2}},'
        '"meta":1,"name":"sum","op":0,"source":0}],'
        '"operators":["aten::sum.dim_IntList"],"outputs":["sum",null,3]}\n'
    )


# --- tables -----------------------------------------------------------------------------------------------


def test_tables_have_each_entry_once_in_the_order_of_first_use():
    first, second = SizeMeta(), SizeMeta(value=2)
    nodes = [Node(name=op, op=f"aten::{op}", meta=meta) for op, meta in (("b", second), ("a", first), ("b.c", second))]
    graph = Graph(inputs=(GraphInput(name="x", meta=first),), nodes=(*nodes, nodes[0]), outputs=[])
    written = as_written(graph)
    assert (written.metas, written.operators) == ((first, second), ("aten::b", "aten::a", "aten::b.c"))
    assert [(node.meta, node.op) for node in written.nodes] == [(1, 0), (0, 1), (1, 2), (1, 0)]
    assert graph == Graph(inputs=graph.inputs, nodes=(*nodes, nodes[0]), outputs=[])
    assert (nodes[0].op, nodes[0].meta, min_reader([written])) == ("aten::b", second, (1, 1))


def test_table_does_not_take_an_integer_for_a_float_that_is_equal():
    metas = [SizeMeta(value=SizeExpression(op="mul", args=("s0", factor))) for factor in (1, 1.0)]
    graph = Graph(
        inputs=tuple(GraphInput(name=str(i), meta=meta) for i, meta in enumerate(metas)), nodes=(), outputs=[]
    )
    assert repr(decode_record(encode_record(graph), Graph, where="x")) == repr(graph)
