"""Functional graphs by hand, of what the exporter leaves to the forward graph or writes otherwise."""

import json
import math
from typing import Any

from tests.golden.call_table.row import CALL, FUNCTIONAL, HOOKED, NO_GRAD, PROGRAM, WITHOUT, backward, edit, golden_call


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
    "aten::_to_copy.default": "aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor",
    "aten::mul.Tensor": "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::rand_like.default": "aten::rand_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor",
    "aten::repeat.default": "aten::repeat(Tensor self, SymInt[] repeats) -> Tensor",
    "aten::reshape.default": "aten::reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)",
    "aten::sin.default": "aten::sin(Tensor self) -> Tensor",
    "aten::sub.Tensor": "aten::sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::sum.default": "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor",
    "aten::t.default": "aten::t(Tensor(a) self) -> Tensor(a)",
    "aten::view.default": "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)",
}


def graph(inputs: dict[str, dict[str, Any]], nodes: list[dict[str, Any]], outputs: list[Any]) -> dict[str, Any]:
    """Return a graph."""
    return {
        "inputs": [{"name": name, "meta": like} for name, like in inputs.items()],
        "nodes": nodes,
        "outputs": outputs,
        "schemas": {op: SCHEMAS[op] for op in sorted({each["op"] for each in nodes} & set(SCHEMAS))},
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
    path = f"programs/{program}"
    return [
        {"file": f"{path}/{file}", "text": json.dumps(graph(inputs, nodes, outputs))},
        {"file": "bundle.json", "at": ["files"], "append": {"path": f"{path}/{file}", "nbytes": 0, "sha256": "0" * 64}},
        edit(f"{path}/program.json", [FUNCTIONAL], {"file": file, **record}),
        edit(f"{path}/program.json", ["refusals"], []),
    ]


def tangent(of: str, index: int, like: dict[str, Any]) -> dict[str, Any]:
    """Return a tangent laid out as its metadata say."""
    return {"of": of, "index": index, "meta": like, "stride": like["stride"]}


FRESH = {"kind": "fresh", "requires_grad": True}
JOINT = "programs/train/joint.json"
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
        "file": JOINT,
        "text": json.dumps(
            graph(
                dict.fromkeys(("input:x", "input:y", "tangent:0"), ROW),
                [
                    node("mul", "mul.Tensor", "input:x", 2, like=ROW),
                    node("mul_1", "mul.Tensor", "input:y", 0, like=ROW),
                    node("add", "add.Tensor", "mul", "mul_1", like=ROW),
                    node("mul_2", "mul.Tensor", "tangent:0", 2, like=ROW),
                ],
                ["add", "mul_2", "mul_1"],
            )
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


def sum_of_gradients(name: str, nodes: list[dict[str, Any]]) -> None:
    """Add a call of a joint graph whose `nodes` add the gradient of a sum to that of a sine, `mul`."""
    nodes = [
        node("sum", "sum.default", "input:x", like=meta()),
        node("sin", "sin.default", "input:x", like=ROW),
        node("cos", "cos.default", "input:x", like=ROW),
        node("mul", "mul.Tensor", "tangent:1", "cos", like=ROW),
        *nodes,
    ]
    inputs = {"input:x": ROW, "tangent:0": meta(), "tangent:1": ROW}
    edits = [
        {"file": JOINT, "text": json.dumps(graph(inputs, nodes, ["sum", "sin", nodes[-1]["name"]]))},
        edit(PROGRAM, [FUNCTIONAL, "gradients", "partitions", 0, "saved"], ["input:x"]),
    ]
    one = backward("output[0]")
    golden_call(name, "10.23", "gradients_that_are_added", "functional", CALL, one, edits=edits)


def total(other: str, op: str = "add.Tensor", **more: Any) -> dict[str, Any]:
    """Return the node of a sum with the gradient of the sine."""
    return node("add", op, "mul", other, like=ROW, **more)


ONE = node("one", "mul.Tensor", "tangent:0", 1, like=meta())
sum_of_gradients("sum_of_another_shape_with_an_undefined_tangent", [ONE, total("one")])
SUMS = [node("zero", "mul.Tensor", "cos", 0, like=ROW), node("sums", "add.Tensor", "zero", "tangent:0", like=ROW)]
MINUS = node("minus", "mul.Tensor", "sums", -1, like=ROW)
sum_of_gradients("difference_with_an_undefined_tangent", [*SUMS, MINUS, total("minus", "sub.Tensor")])
HALVES = node("halves", "mul.Tensor", "sums", 0.5, like=ROW)
sum_of_gradients("sum_with_a_factor_and_an_undefined_tangent", [*SUMS, HALVES, total("halves", alpha=2)])
WIDE = {**ROW, "dtype": "float64"}
WIDER = [
    node("wide", "_to_copy.default", "mul", like=WIDE, dtype={"kind": "dtype", "value": "float64"}),
    node("add", "add.Tensor", "wide", "sums", like=WIDE),
    node("least", "mul.Tensor", "add", 1e-200, like=WIDE),
    node("again", "mul.Tensor", "least", 1e200, like=WIDE),
    node("narrow", "_to_copy.default", "again", like=ROW, dtype={"kind": "dtype", "value": "float32"}),
]
sum_of_gradients("sum_of_another_dtype_with_an_undefined_tangent", [*SUMS, *WIDER])

# --- results whose values come from those of others --------------------------------------------------------

golden_call(
    "view_whose_value_comes_from_one_without_gradient",
    "10.14",
    "views_on_the_way_to_others",
    "functional",
    edits=[
        {"file": JOINT, "at": ["nodes"], "append": node("flat", "repeat.default", "detach", [2], like=meta(6))},
        edit(JOINT, ["schemas", "aten::repeat.default"], SCHEMAS["aten::repeat.default"]),
        edit(JOINT, ["outputs", 0], "flat"),
    ],
)
ROWS = '{"args":["tangent:0",[6]],"meta":0,"name":"view_1","op":1,"source":0}'
COLUMNS = [
    node("columns", "t.default", "tangent:0", like=meta(3, 2)),
    node("flat", "view.default", "columns", [6], like=meta(6)),
    node("rows", "view.default", "flat", [3, 2], like=meta(3, 2)),
    node("turned", "t.default", "rows", like={**meta(2, 3), "stride": [1, 2]}),
    node("view_1", "reshape.default", "turned", [6], like=meta(6)),
]
golden_call(
    "gradient_that_is_copied_to_strides",
    "10.18",
    "results_that_are_laid_out",
    "functional",
    edits=[
        edit(PROGRAM, [FUNCTIONAL, "gradients", "tangents", 0, "stride"], [1, 2]),
        {"file": JOINT, "replace": [ROWS, ",".join(map(json.dumps, COLUMNS))]},
        *(edit(JOINT, ["schemas", f"aten::{op}.default"], SCHEMAS[f"aten::{op}.default"]) for op in ("t", "reshape")),
    ],
)
