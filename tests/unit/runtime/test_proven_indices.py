"""Which indices of pooling's backward are looked at: all but those of the forward in the same graph."""

from __future__ import annotations

import msgspec
import pytest

from aotexport_runtime.execution.preconditions.dataflow import are_indices_proven
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import NothingMeta

BACKWARD = "aten::max_pool2d_with_indices_backward.default"
WINDOW = [[2, 2], [2, 2], [0, 0], [1, 1], False]


def node(name, op, *args):
    return Node(name=name, op=op, args=[*args], meta=NothingMeta())


POOL = node("pool", "aten::max_pool2d_with_indices.default", "x", [2, 2])
ITEM = node("indices", "python::getitem", "pool", 1)
END = node("grad", BACKWARD, "g", "x", *WINDOW, "indices")
GRAPH = Graph(inputs=(), nodes=(POOL, ITEM, END), outputs=["grad"])


def changed(*nodes, outputs=("grad",)):
    return msgspec.structs.replace(GRAPH, nodes=nodes, outputs=[*outputs])


def test_indices_of_the_forward_need_no_look():
    assert are_indices_proven(GRAPH, END)


UNPROVEN = {
    "of_an_input": changed(END),
    "of_another_item": changed(POOL, node("indices", "python::getitem", "pool", 0), END),
    "of_another_image": changed(node("pool", POOL.op, "y", [2, 2]), ITEM, END),
    "of_another_operator": changed(node("pool", "aten::max.dim", "x", 1), ITEM, END),
    "written_to": changed(POOL, ITEM, node("more", "aten::add_.Tensor", "indices", 9), END),
    "written_to_by_out": changed(POOL, ITEM, node("more", "aten::add.out", "x", "x"), END),
    "in_a_subgraph": changed(POOL, ITEM, node("more", "higher_order::invoke_subgraph", "indices"), END),
    "seen_by_another_operator": changed(POOL, ITEM, node("more", "aten::alias.default", "indices"), END),
    "seen_by_another_name": changed(POOL, ITEM, node("more", "python::getitem", "pool", -1), END),
    "beside_unseen_writes": changed(POOL, ITEM, node("more", "aten::native_batch_norm.default", "x"), END),
    "given_away": changed(POOL, ITEM, END, outputs=["grad", "indices"]),
}


@pytest.mark.parametrize("graph", UNPROVEN.values(), ids=UNPROVEN)
def test_other_indices_are_looked_at(graph):
    assert not are_indices_proven(graph, END)
