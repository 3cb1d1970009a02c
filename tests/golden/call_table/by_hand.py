"""Functional graphs by hand, of what the exporter leaves to the forward graph or writes otherwise."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.golden.call_table.row import (
    CALL,
    FUNCTIONAL,
    HOOKED,
    NO_GRAD,
    PROGRAM,
    WITHOUT,
    backward,
    edit,
    golden_call,
)


def meta(*shape: int) -> dict[str, Any]:
    """Return the metadata of a contiguous tensor."""
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return {"kind": "tensor", "dtype": "float32", "shape": list(shape), "stride": stride}


def node(name: str, op: str, *args: Any, like: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Return a call of an operator of `aten`."""
    return {"name": name, "op": f"aten::{op}", "args": list(args), "kwargs": kwargs, "meta": like}


SCHEMAS = {
    "aten::add.Tensor": "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::cos.default": "aten::cos(Tensor self) -> Tensor",
    "aten::clone.default": "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor",
    "aten::mul.Tensor": "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::sin.default": "aten::sin(Tensor self) -> Tensor",
    "aten::sub.Tensor": "aten::sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::sum.default": "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor",
    "aten::view.default": "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)",
}


def by_hand(
    program: str,
    record: dict[str, Any],
    inputs: dict[str, dict[str, Any]],
    nodes: list[dict[str, Any]],
    outputs: list[Any],
) -> list[dict[str, Any]]:
    """Return the edits that give a program a functional graph."""
    file = "joint.json" if "gradients" in record else "inference.json"
    graph = {
        "inputs": [{"name": name, "meta": like} for name, like in inputs.items()],
        "nodes": nodes,
        "outputs": outputs,
        "schemas": {op: SCHEMAS[op] for op in sorted({each["op"] for each in nodes})},
    }
    path = f"programs/{program}"
    return [
        {"file": f"{path}/{file}", "text": json.dumps(graph)},
        {"file": "bundle.json", "at": ["files"], "append": {"path": f"{path}/{file}", "nbytes": 0, "sha256": "0" * 64}},
        edit(f"{path}/program.json", [FUNCTIONAL], {"file": file, **record}),
        edit(f"{path}/program.json", ["refusals"], []),
    ]


def tangent(of: str, index: int, like: dict[str, Any]) -> dict[str, Any]:
    """Return a tangent laid out as its metadata say."""
    return {"of": of, "index": index, "meta": like, "stride": like["stride"]}


FRESH = {"kind": "fresh", "requires_grad": True}
PLANE, ROW = meta(2, 3), meta(3)
for golden, rises in (("input_storage_replaced", 1), ("input_data_replaced", 0)):
    golden_call(
        f"{golden}_by_an_epilogue",
        "10.6",
        golden,
        "functional",
        WITHOUT,
        program="infer",
        edits=by_hand(
            "infer",
            {
                "mutations": [{"input_index": 0, "storage": True}],
                "version_rises": [{"input_index": 0, "by": rises}],
                "outputs": [{"kind": "fresh"}],
            },
            {"input:x": PLANE, "input:y": PLANE},
            [node("mul", "mul.Tensor", "input:y", 2, like=PLANE)],
            ["input:y", "mul"],
        ),
    )
WRITTEN = by_hand(
    "train",
    {
        "mutations": [{"input_index": 0, "data": True, "requires_grad": True, "is_leaf": False}],
        "outputs": [FRESH],
        "gradients": {
            "tangents": [tangent("mutation", 0, ROW), tangent("output", 0, ROW)],
            "of_inputs": [2, 3],
            "partitions": [{"name": "default", "saved": ["input:y", "clone"]}],
        },
    },
    {"input:x": ROW, "input:y": ROW, "tangent:0": ROW, "tangent:1": ROW},
    [
        node("clone", "clone.default", "input:x", like=ROW),
        node("mul", "mul.Tensor", "input:x", "input:y", like=ROW),
        node("mul_1", "mul.Tensor", "mul", 2, like=ROW),
        node("mul_2", "mul.Tensor", "tangent:1", 2, like=ROW),
        node("add", "add.Tensor", "tangent:0", "mul_2", like=ROW),
        node("mul_3", "mul.Tensor", "add", "input:y", like=ROW),
        node("mul_4", "mul.Tensor", "add", "clone", like=ROW),
    ],
    ["mul", "mul_1", "mul_3", "mul_4"],
)
golden_call(
    "history_of_a_changed_input",
    "10.8",
    "input_changed_with_gradients",
    "functional",
    CALL,
    backward("x", "output"),
    edits=WRITTEN,
)
golden_call(
    "history_of_a_changed_leaf_without_gradient",
    "10.8",
    "input_changed_with_gradients",
    "functional",
    CALL,
    backward("x", "output"),
    edits=[*WRITTEN, edit(PROGRAM, [FUNCTIONAL, "mutations", 0], {"input_index": 0, "data": True})],
    x=NO_GRAD,
)
SQUARE, FLAT = meta(2, 2), meta(4)
golden_call(
    "view_that_comes_to_require_grad",
    "10.13",
    "view_that_comes_to_require_grad",
    "functional",
    edits=by_hand(
        "train",
        {
            "outputs": [
                {
                    "kind": "input_alias",
                    "input_index": 0,
                    "requires_grad": True,
                    "steps": [{"op": "aten::view.default", "args": [[4]]}],
                },
                FRESH,
            ],
            "gradients": {
                "tangents": [tangent("output", 1, SQUARE)],
                "of_inputs": [None, 2],
                "partitions": [{"name": "default", "saved": ["input:x"]}],
            },
        },
        {"input:x": SQUARE, "input:w": SQUARE, "tangent:0": SQUARE},
        [
            node("view", "view.default", "input:x", [4], like=FLAT),
            node("mul", "mul.Tensor", "input:x", "input:w", like=SQUARE),
            node("mul_1", "mul.Tensor", "tangent:0", "input:x", like=SQUARE),
        ],
        ["view", "mul", "mul_1"],
    ),
)
ZERO = [
    {
        "file": "programs/train/joint.json",
        "text": json.dumps(
            {
                "inputs": [{"name": name, "meta": ROW} for name in ("input:x", "input:y", "tangent:0")],
                "nodes": [
                    node("mul", "mul.Tensor", "input:x", 2, like=ROW),
                    node("mul_1", "mul.Tensor", "input:y", 0, like=ROW),
                    node("add", "add.Tensor", "mul", "mul_1", like=ROW),
                    node("mul_2", "mul.Tensor", "tangent:0", 2, like=ROW),
                ],
                "outputs": ["add", "mul_2", "mul_1"],
                "schemas": {op: SCHEMAS[op] for op in ("aten::add.Tensor", "aten::mul.Tensor")},
            }
        ),
    },
    edit(PROGRAM, [FUNCTIONAL, "gradients", "partitions", 0, "saved"], ["mul_1"]),
    edit(PROGRAM, [FUNCTIONAL, "gradients", "saves_nothing"], False),
]
golden_call(
    "undefined_tangents_of_a_gradient_without_any",
    "10.22",
    "gradient_that_is_zero",
    "functional",
    CALL,
    backward(undefined=True),
    edits=ZERO,
)
golden_call("hooks_that_no_tangent_reaches", "10.3", "gradient_that_is_zero", "functional", edits=ZERO, y=HOOKED)


def sum_of_gradients(name: str, half: list[dict[str, Any]], op: str = "add.Tensor", **more: Any) -> None:
    """Add a call of a joint graph that adds the gradient of a sum, made by `half`, to that of a sine."""
    nodes = [
        node("sum", "sum.default", "input:x", like=meta()),
        node("sin", "sin.default", "input:x", like=ROW),
        node("cos", "cos.default", "input:x", like=ROW),
        node("mul", "mul.Tensor", "tangent:1", "cos", like=ROW),
        *half,
        node("add", op, "mul", half[-1]["name"], like=ROW, **more),
    ]
    graph = {
        "inputs": [
            {"name": "input:x", "meta": ROW},
            {"name": "tangent:0", "meta": meta()},
            {"name": "tangent:1", "meta": ROW},
        ],
        "nodes": nodes,
        "outputs": ["sum", "sin", "add"],
        "schemas": {op: SCHEMAS[op] for op in sorted({each["op"] for each in nodes})},
    }
    edits = [
        {"file": "programs/train/joint.json", "text": json.dumps(graph)},
        edit(PROGRAM, [FUNCTIONAL, "gradients", "partitions", 0, "saved"], ["input:x"]),
    ]
    one = backward("output[0]")
    golden_call(name, "10.23", "gradients_that_are_added", "functional", CALL, one, edits=edits)


ONE = node("one", "mul.Tensor", "tangent:0", 1, like=meta())
sum_of_gradients("sum_of_another_shape_with_an_undefined_tangent", [ONE])
HALF = node("half", "mul.Tensor", "cos", 0, like=ROW)
HALVES = [
    HALF,
    node("sums", "add.Tensor", "half", "tangent:0", like=ROW),
    node("halves", "mul.Tensor", "sums", 0.5, like=ROW),
]
MINUS = [*HALVES[:2], node("minus", "mul.Tensor", "sums", -1, like=ROW)]
sum_of_gradients("difference_with_an_undefined_tangent", MINUS, "sub.Tensor")
sum_of_gradients("sum_with_a_factor_and_an_undefined_tangent", HALVES, alpha=2)
