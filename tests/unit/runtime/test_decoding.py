"""Graphs of a decoding step, before and after."""

from __future__ import annotations

import math

import pytest
import torch

from aotexport_runtime.execution.codegen import Environment, compile_graph
from aotexport_runtime.rewrite.decoding import decoding, slot_of
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.values import SizeMeta, TensorMeta

LENGTH = 5


def tensor(*shape, dtype="float32"):
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return TensorMeta(dtype=dtype, shape=shape, stride=tuple(strides))


def node(name, op, *args, meta, **kwargs):
    return Node(name=name, op=f"aten::{op}", args=list(args), kwargs=kwargs, meta=meta)


def step(heads=4, *, mask="bool", axis=-2, masks=1, attended=("whole", "whole")):
    """A step of attention: normed tokens are queries, and the keys and values of two heads that queries share."""
    attended = (*attended, "mask")[: 2 + (mask is not None)]
    cache, longer, short = tensor(1, 2, LENGTH - 1, 8), tensor(1, 2, LENGTH, 8), tensor(1, heads, 1, 8)
    one, spread, whole = tensor(1, heads, 1, 1), tensor(1, 2, heads // 2, LENGTH, 8), tensor(1, heads, LENGTH, 8)
    nodes = [
        node("square", "pow.Tensor_Scalar", "x", 2, meta=short),
        node("mean", "mean.dim", "square", [-1], True, meta=one),
        node("shifted", "add.Tensor", "mean", 1e-6, meta=one),
        node("inverse", "rsqrt.default", "shifted", meta=one),
        node("normed", "mul.Tensor", "x", "inverse", meta=short),
        node("query", "mul.Tensor", "weight", "normed", meta=short),
        node("same", "contiguous.default", "query", meta=short),
        node("kept", "contiguous.default", "new", meta=tensor(1, 2, 1, 8)),
        node("keys", "cat.default", ["cache", "kept"], axis, meta=longer),
        node("several", "unsqueeze.default", "keys", 2, meta=tensor(1, 2, 1, LENGTH, 8)),
        node("spread", "expand.default", "several", [1, 2, heads // 2, LENGTH, 8], meta=spread),
        node("whole", "reshape.default", "spread", [1, heads, LENGTH, 8], meta=whole),
        node("found", "scaled_dot_product_attention.default", "same", *attended, meta=short, scale=0.3),
    ]
    named = {"x": short, "weight": tensor(8), "mask": tensor(1, masks, 1, LENGTH, dtype=mask or "bool")}
    named |= {"cache": cache, "own": whole}
    inputs = [GraphInput(name=name, meta=meta) for name, meta in named.items()]
    new = GraphInput(name="new", meta=tensor(1, 2, 1, 8))
    return Graph(inputs=(*inputs, new), nodes=tuple(nodes), outputs=["found", "keys"])


def run(graph, nodes, given, outputs):
    return compile_graph(graph, nodes, list(given), outputs, Environment())(list(given.values()), {})


OF_HEADS = ({"masks": 4}, {"attended": ("own", "whole")}, {"attended": ("whole", "own")})
"""Steps with a mask, keys or values of each head."""


@pytest.mark.parametrize(("mask", "of_heads"), [(None, {}), ("bool", {}), *(("float32", of) for of in ({}, *OF_HEADS))])
def test_step_writes_into_a_slot_and_computes_the_same(mask, of_heads):
    torch.manual_seed(0)
    graph = step(mask=mask, **of_heads)
    shown, masks = torch.tensor([False, True, True, False, True]), of_heads.get("masks", 1)
    numbers = torch.zeros(LENGTH).masked_fill(~shown, -torch.inf)
    given = {
        "x": torch.randn(1, 4, 1, 8),
        "weight": torch.randn(8),
        "mask": shown[None, None, None] if mask == "bool" else (numbers + torch.rand(masks, 1, LENGTH))[None],
        "own": torch.randn(1, 4, LENGTH, 8),
        "cache": torch.randn(1, 2, LENGTH - 1, 8),
        "new": torch.randn(1, 2, 1, 8),
    }
    expected, keys = run(graph, graph.nodes, given, graph.outputs)
    found = decoding(graph, {"cache": 1})
    grown = torch.zeros(1, 2, 2 * LENGTH, 8)[:, :, :LENGTH]
    grown[:, :, :-1] = given["cache"]
    (got,) = run(graph, found.nodes, {**given, "keys": grown, slot_of("keys"): grown[:, :, -1:]}, [found.scores])
    torch.testing.assert_close(got, expected)
    assert torch.equal(grown, keys)
    ops = {each.op for each in found.nodes}
    assert not {"aten::cat.default", "aten::contiguous.default", "aten::rsqrt.default"} & ops
    assert ("aten::expand.default" in ops) == bool(of_heads)
    assert found.grown == {"cache": "keys"}
    assert len(found.nodes) == (6 if of_heads else 7 if mask == "bool" else 5)


def layer():
    """A step of one row per sequence: a projection whose halves are turned, its caches, and a layer with GELU."""
    row, split, turned, half, longer = tensor(2, 1, 8), tensor(2, 1, 2, 4), tensor(2, 2, 1, 4), tensor(2, 2, 1, 2), 3
    grown, end = tensor(2, 2, longer, 4), (1 << 63) - 1
    nodes = [
        node("projected", "linear.default", "x", "weight", meta=row),
        node("kept", "dropout.default", "projected", 0.1, False, meta=row),
        node("split", "view.default", "kept", [2, 1, 2, 4], meta=split),
        node("heads", "transpose.int", "split", 1, 2, meta=turned),
        node("plain", "mul.Tensor", "heads", "cosine", meta=turned),
        node("first", "slice.Tensor", "heads", 3, 0, 2, meta=half),
        node("second", "slice.Tensor", "heads", 3, 2, end, meta=half),
        node("negative", "neg.default", "second", meta=half),
        node("swapped", "cat.default", ["negative", "first"], -1, meta=turned),
        node("added", "mul.Tensor", "swapped", "sine", meta=turned),
        node("rotated", "add.Tensor", "plain", "added", meta=turned),
        node("keys", "cat.default", ["cache", "rotated"], -2, meta=grown),
        node("sums", "sum.dim_IntList", "keys", [2], True, meta=turned),
        node("back", "transpose.int", "sums", 1, 2, meta=split),
        node("gathered", "contiguous.default", "back", meta=split),
        node("joined", "reshape.default", "gathered", [2, 1, 8], meta=row),
        node("wide", "linear.default", "joined", "weight", "bias", meta=row),
        node("half", "mul.Tensor", "wide", 0.5, meta=row),
        node("cube", "pow.Tensor_Scalar", "wide", 3.0, meta=row),
        node("small", "mul.Tensor", "cube", 0.044715, meta=row),
        node("sum", "add.Tensor", "wide", "small", meta=row),
        node("scaled", "mul.Tensor", "sum", math.sqrt(2 / math.pi), meta=row),
        node("tanh", "tanh.default", "scaled", meta=row),
        node("above", "add.Tensor", "tanh", 1.0, meta=row),
        node("gelu", "mul.Tensor", "half", "above", meta=row),
        node("residual", "add.Tensor", "x", "gelu", meta=row),
        node("last", "slice.Tensor", "residual", 1, -1, end, meta=row),
        node("scores", "select.int", "last", 1, -1, meta=tensor(2, 8)),
    ]
    named = {"x": row, "weight": tensor(8, 8), "bias": tensor(8), "cosine": tensor(2, 1, 1, 4)}
    named |= {"sine": tensor(2, 1, 1, 4), "cache": tensor(2, 2, longer - 1, 4)}
    inputs = tuple(GraphInput(name=name, meta=meta) for name, meta in named.items())
    return Graph(inputs=inputs, nodes=tuple(nodes), outputs=["scores", "keys"])


def test_rows_of_sequences_are_matrices_and_known_forms_are_one_operator():
    torch.manual_seed(0)
    graph = layer()
    given = {each.name: torch.randn(each.meta.shape) for each in graph.inputs}
    expected, keys = run(graph, graph.nodes, given, graph.outputs)
    found = decoding(graph, {"cache": 1})
    grown = torch.cat([given["cache"], torch.zeros(2, 2, 1, 4)], 2)
    more = {"keys": grown, slot_of("keys"): grown[:, :, -1:], found.turned["weight"]: given["weight"].t()}
    (got,) = run(graph, found.nodes, {**given, **more}, [found.scores])
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(grown, keys)
    assert [each.op.removeprefix("aten::").partition(".")[0] for each in found.nodes] == [
        *("reshape", "mm", "reshape", "mul", "slice", "neg", "slice", "cat", "roll", "addcmul"),
        *("copy_", "sum", "reshape", "addmm", "gelu", "add"),
    ]


@pytest.mark.parametrize("axes", [(0, 3), (3, 0)])
def test_mask_that_is_looked_up_whole_and_in_order_is_itself(axes):
    shapes = [tuple(LENGTH if axis == each else 1 for axis in range(4)) for each in axes]
    places = [[each for each in (3, 2, 1, 0) if each != axis] for axis in axes]
    whole, nodes = tensor(LENGTH, 1, 1, LENGTH, dtype="bool"), []
    for name, shape, added in zip(("rows", "columns"), shapes, places, strict=True):
        nodes.append(node(f"{name}0", "arange.default", LENGTH, meta=tensor(LENGTH, dtype="int64")))
        for order, axis in enumerate(sorted(added)):
            meta = tensor(*[size for place, size in enumerate(shape) if place not in sorted(added)[order + 1 :]])
            nodes.append(node(f"{name}{order + 1}", "unsqueeze.default", f"{name}{order}", axis, meta=meta))
    nodes += [
        node("past", "sym_size.int", "cache", 2, meta=SizeMeta(value=LENGTH - 1)),
        Node(name="end", op="python::add", args=["past", 1], meta=SizeMeta(value=LENGTH)),
        node("places", "arange.default", "end", meta=tensor(LENGTH, dtype="int64")),
        node("zero", "arange.default", 1, meta=tensor(1, dtype="int64")),
        node("last", "add.Tensor", "zero", "past", meta=tensor(1, dtype="int64")),
        node("is_past", "le.Tensor", "places", "last", meta=tensor(LENGTH, dtype="bool")),
        node("looked_up", "index.Tensor", "shown", ["rows3", "columns3"], meta=whole),
        node("same", "__and__.Tensor", "looked_up", "is_past", meta=whole),
        node("keys", "cat.default", ["cache", "new"], -2, meta=tensor(1, 1, LENGTH, 1)),
        node("scores", "where.ScalarOther", "same", "weight", 0, meta=tensor(LENGTH, 1, 1, LENGTH)),
    ]
    named = {"shown": tensor(LENGTH, LENGTH, dtype="bool"), "weight": tensor(LENGTH)}
    named |= {"cache": tensor(1, 1, LENGTH - 1, 1), "new": tensor(1, 1, 1, 1)}
    inputs = tuple(GraphInput(name=name, meta=meta) for name, meta in named.items())
    graph = Graph(inputs=inputs, nodes=tuple(nodes), outputs=["scores", "keys"])
    given = {"shown": torch.rand(LENGTH, LENGTH) > 0.5, "weight": torch.rand(LENGTH) + 1}
    given |= {"cache": torch.rand(1, 1, LENGTH - 1, 1), "new": torch.rand(1, 1, 1, 1)}
    expected, _ = run(graph, graph.nodes, given, graph.outputs)
    found = decoding(graph, {"cache": 1})
    more = {"keys": torch.zeros(1, 1, LENGTH, 1), slot_of("keys"): torch.zeros(1, 1, 1, 1)}
    (got,) = run(graph, found.nodes, {**given, **more}, [found.scores])
    assert torch.equal(got, expected)
    ops = [each.op.partition("::")[2].partition(".")[0] for each in found.nodes]
    assert "le" not in ops
    assert ("index" in ops) == (axes == (3, 0))


def test_cache_that_grows_along_another_axis_is_left_to_the_graph():
    assert decoding(step(axis=1), {"cache": 1}) is None
