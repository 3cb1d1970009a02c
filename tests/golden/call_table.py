"""What the golden calls are; `record_calls.py` writes them with what eager shows."""

from __future__ import annotations

import json
import math
from typing import Any

CALL: dict[str, Any] = {"call": True}
WITHOUT: dict[str, Any] = {"call": False}
BACKWARD: dict[str, Any] = {"backward": []}


def backward(*roots: str, **options: Any) -> dict[str, Any]:
    """Return the step of a backward pass from outputs or arguments; none named: from all outputs."""
    return {"backward": list(roots), **options}


def change(path: str, *, recorded: bool = False) -> dict[str, Any]:
    """Return the step that doubles a tensor in place."""
    return {"change": path, "recorded": recorded}


def edit(file: str, at: list[Any], value: Any) -> dict[str, Any]:
    """Return an edit of a file of the bundle."""
    return {"file": file, "at": at, "set": value}


PROGRAM = "programs/train/program.json"
FUNCTIONAL = "functional"

CALLS: dict[str, dict[str, Any]] = {}


def golden_call(
    name: str,
    rule: str,
    golden: str,
    graph: str,
    *steps: dict[str, Any],
    program: str = "train",
    edits: list[dict[str, Any]] | None = None,
    **arguments: dict[str, Any],
) -> None:
    """Add a golden call.

    Args:
        name: what it shows.
        rule: number of the rule that it shows.
        golden: the bundle that it is a call of.
        graph: `functional`, `forward`: the graph that serves it where a reader has both; `refused`.
        steps: what is done; none: a call that records gradients, and a backward pass.
        program: of the bundle.
        edits: of the bundle.
        arguments: by path, what differs from the recorded call.
    """
    assert name not in CALLS
    found: dict[str, Any] = {"rule": rule, "golden": golden, "program": program, "graph": graph}
    found["steps"] = list(steps) or ([CALL] if graph == "refused" else [CALL, BACKWARD])
    paths = {path.replace("args0", "args[0]"): said for path, said in arguments.items()}
    CALLS[name] = {**found, **({"edits": edits} if edits else {}), **({"arguments": paths} if paths else {})}


NO_GRAD = {"requires_grad": False}
MOVED = {"offset": 1}
COLUMNS = {"stride": [1, 4]}
LEAF, NO_LEAF = {"is_leaf": True}, {"is_leaf": False}
HOOKED = {"hook": True}

# --- 10.3: soft guards ------------------------------------------------------------------------------------

RELIES = "results_that_rely_on_different_inputs"
golden_call("usual_call", "10.3", "linear", "functional")
golden_call("without_grad_mode", "10.3", "linear", "forward", WITHOUT)
golden_call("no_input_requires_grad", "10.3", "backward_passes_that_repeat", "forward", CALL, x=NO_GRAD, y=NO_GRAD)
golden_call("only_detached_inputs_require_grad", "10.3", "outputs_without_gradient", "forward", CALL, x=NO_GRAD)
golden_call("inference_program_with_grad_mode", "10.3", "linear", "forward", program="infer")
golden_call("inference_program_without_grad_mode", "10.3", "linear", "functional", WITHOUT, program="infer")
golden_call(
    "joint_graph_of_an_inference_program",
    "10.3",
    "backward_passes_that_repeat",
    "forward",
    edits=[edit(PROGRAM, ["grad"], False)],
)
golden_call("function_transform", "10.3", "linear", "forward", {"call": True, "transform": True})
golden_call("autocast_of_the_caller", "10.3", "linear", "forward", {"call": True, "autocast": "bfloat16"})
golden_call(
    "guard_of_the_functional_graph",
    "10.3",
    "size_output",
    "forward",
    edits=[edit(PROGRAM, [FUNCTIONAL, "guards"], [{"op": "lt", "args": ["s33", 4]}])],
)
golden_call("size_that_is_zero", "10.3", "sizes_that_may_be_zero", "forward", x={"shape": [0, 2]})
golden_call("other_strides", "10.3", "linear", "forward", input=COLUMNS)
golden_call(
    "other_stride_of_an_axis_of_size_one",
    "10.3",
    "sizes_that_may_be_zero",
    "functional",
    x={"shape": [1, 2], "stride": [7, 1]},
)
OTHER_DTYPES = "parts_of_views_of_other_dtypes"
golden_call("pending_conjugation", "10.3", OTHER_DTYPES, "forward", WITHOUT, program="infer", z={"conj": True})
golden_call(
    "pending_negation", "10.3", "changes_that_undo_each_other", "forward", WITHOUT, program="infer", w={"neg": True}
)
golden_call("input_that_required_no_grad", "10.3", "linear", "forward", input={"requires_grad": True})
golden_call("changed_leaf_that_was_none", "10.3", "input_data_mutated", "forward", z=LEAF)
golden_call("changed_leaf_that_is_none", "10.3", "input_data_mutated", "forward", w=NO_LEAF)
golden_call("hooks_that_some_tangents_reach", "10.3", RELIES, "forward", y=HOOKED)
golden_call("hooks_that_all_tangents_reach", "10.3", RELIES, "functional", x=HOOKED)
golden_call("memory_shared_with_a_changed_input", "10.3", "input_data_mutated", "forward", y={"key": "input0"})
golden_call("offset_of_an_input_that_turns", "10.3", "input_data_and_metadata_mutated", "forward", x=MOVED)
golden_call("offset_where_as_strided_is_called", "10.3", "strided_view_of_input", "forward", x=MOVED)
WITHOUT_STEPS = [edit(PROGRAM, [FUNCTIONAL, "outputs", 0, "steps"], None)]
golden_call(
    "offset_of_a_changed_base_without_steps", "10.3", "view_of_mutated_input", "forward", edits=WITHOUT_STEPS, x=MOVED
)
golden_call("changed_base_without_steps", "10.12", "view_of_mutated_input", "functional", edits=WITHOUT_STEPS)

# --- 10.5 to 10.9: inputs that change ---------------------------------------------------------------------

golden_call("producer_of_a_detached_input", "10.5", "outputs_without_gradient", "functional")
golden_call(
    "change_without_gradients_leaves_the_history",
    "10.8",
    "input_data_mutated",
    "functional",
    CALL,
    BACKWARD,
    backward("z"),
)
golden_call(
    "leaf_that_changes",
    "10.8",
    "input_data_mutated",
    "functional",
    edits=[edit(PROGRAM, [FUNCTIONAL, "mutations", 2, "under_no_grad"], False)],
)
golden_call("versions_of_changed_inputs", "10.9", "input_data_mutated", "functional", CALL)
golden_call("versions_of_running_statistics", "10.9", "normalisation", "functional", CALL)
UNDONE = "changes_that_undo_each_other"
golden_call("versions_of_changes_that_undo_each_other", "10.9", UNDONE, "functional", CALL)
# --- 10.10 to 10.16: outputs ------------------------------------------------------------------------------

golden_call(
    "view_of_a_custom_function_that_is_changed",
    "10.10",
    "custom_function_view",
    "functional",
    CALL,
    change("output", recorded=True),
)
golden_call(
    "one_of_several_views_that_is_changed",
    "10.10",
    "several_views_of_input",
    "functional",
    CALL,
    change("output[0]", recorded=True),
)
golden_call("plain_result_that_is_changed", "10.10", "linear", "functional", CALL, change("output", recorded=True))
golden_call("steps_from_another_offset", "10.12", "view_of_mutated_input", "functional", x=MOVED)
golden_call(
    "steps_that_give_another_shape",
    "10.12",
    "view_of_mutated_input",
    "functional",
    edits=[edit(PROGRAM, [FUNCTIONAL, "outputs", 0, "steps", 0, "args"], [[3, 2]])],
)
golden_call("parts_in_another_dtype", "10.12", OTHER_DTYPES, "functional", WITHOUT, program="infer")
golden_call("view_without_gradients", "10.12", "view_under_no_grad", "functional")
RETAINED = {"retain": ["output[0]"]}
golden_call(
    "gradient_of_a_returned_base", "10.12", "view_of_output", "functional", CALL, RETAINED, backward("output[1]")
)
golden_call(
    "gradients_of_returned_views",
    "10.14",
    "view_of_returned_view",
    "functional",
    CALL,
    {"retain": [f"output[{index}]" for index in range(4)]},
    backward("output[1]", "output[3]"),
)
golden_call("grad_mode_that_is_left", "10.16", "grad_mode_left_off", "functional", CALL)

# --- 10.17 to 10.25: gradients ----------------------------------------------------------------------------

golden_call("result_that_needed_inputs_do_not_reach", "10.17", RELIES, "functional", x=NO_GRAD, y=NO_GRAD)
LAID_OUT = "results_that_are_laid_out"
golden_call(
    "gradient_in_another_layout", "10.18", LAID_OUT, "functional", CALL, backward("output[0]", strides="reversed")
)
OVERLAPS = [edit(PROGRAM, [FUNCTIONAL, "gradients", "tangents", 1, "stride"], [0, 0])]
golden_call("gradient_that_overlaps_itself", "10.18", LAID_OUT, "functional", edits=OVERLAPS)
golden_call("gradient_of_one_input", "10.19", "backward_passes_that_repeat", "functional", x=NO_GRAD)
golden_call(
    "output_changed_before_backward", "10.20", RELIES, "functional", CALL, change("output[0]"), backward("output[1]")
)
golden_call("input_changed_before_backward", "10.20", RELIES, "functional", CALL, change("y"), BACKWARD)
golden_call("change_that_a_pass_does_not_read", "10.20", RELIES, "functional", CALL, change("y"), backward("output[0]"))
golden_call(
    "change_that_needed_gradients_do_not_read", "10.20", RELIES, "functional", CALL, change("y"), BACKWARD, x=NO_GRAD
)
golden_call(
    "saved_value_changed_before_backward",
    "10.20",
    "custom_autograd_function",
    "functional",
    CALL,
    change("x"),
    BACKWARD,
)
golden_call("second_backward", "10.20", RELIES, "functional", CALL, BACKWARD, BACKWARD)
golden_call(
    "second_backward_of_a_retained_graph", "10.20", RELIES, "functional", CALL, backward(retain_graph=True), BACKWARD
)
golden_call(
    "second_backward_where_nothing_is_saved",
    "10.20",
    "backward_passes_that_repeat",
    "functional",
    CALL,
    BACKWARD,
    BACKWARD,
)
golden_call(
    "backward_of_the_backward",
    "10.21",
    "detached_item_of_input",
    "functional",
    CALL,
    backward(of=["x", "y"], again=True),
)
golden_call("pass_from_one_result", "10.22", RELIES, "functional", CALL, backward("output[0]"))
golden_call("undefined_tangents", "10.22", RELIES, "functional", CALL, backward(undefined=True))
golden_call(
    "sum_with_an_undefined_tangent",
    "10.23",
    "gradients_that_are_added",
    "functional",
    CALL,
    backward("output[0]", of=["x"]),
)
golden_call(
    "zeros_for_an_undefined_tangent", "10.24", "parts_that_are_returned", "functional", CALL, backward("output[1]")
)
SIZED = "gradients_of_data_dependent_sizes"
golden_call("undefined_tangent_of_a_size_of_data", "10.25", SIZED, "functional", CALL, backward("output[1]"))
golden_call("defined_tangent_of_a_size_of_data", "10.25", SIZED, "functional", CALL, backward("output[0]"))

# --- 7: graphs --------------------------------------------------------------------------------------------

LOOKUP = "lookup_in_regions"
golden_call("call_that_fails_in_a_region", "7.7", LOOKUP, "functional", CALL, rows={"values": [2, 0, 3]})
golden_call("checkpointed_input_that_changed", "7.11", "checkpoint", "functional", CALL, change("w"), BACKWARD)
READS = "checkpoint_that_reads_state"
golden_call("checkpoint_that_reads_what_is_there_by_then", "7.11", READS, "forward", CALL, change("scale"), BACKWARD)
golden_call("checkpoint_that_draws_anew", "7.11", READS, "forward")
golden_call("loop_without_a_step_gives_copies", "7.14", "loop_without_a_step", "forward", WITHOUT)
golden_call("bodies_that_draw_again", "7.17", "bodies_that_draw", "functional")
WRITES = "custom_function_that_writes"
golden_call("custom_function_with_all_gradients", "7.21", WRITES, "forward")
golden_call("custom_function_with_one_gradient", "7.21", WRITES, "forward", CALL, backward("output[0]"))
golden_call("custom_function_with_the_other_gradient", "7.21", WRITES, "forward", CALL, backward("output[1]"))
golden_call(
    "custom_function_that_is_differentiated_once", "7.21", WRITES, "forward", CALL, backward(of=["x", "y"], again=True)
)

# --- functional graphs by hand, of what the exporter leaves to the forward graph --------------------------


def meta(*shape: int) -> dict[str, Any]:
    """Return the metadata of a contiguous tensor."""
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return {"kind": "tensor", "dtype": "float32", "shape": list(shape), "stride": stride}


def node(name: str, op: str, *args: Any, like: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Return a call of an operator of `aten`."""
    return {"name": name, "op": f"aten::{op}", "args": list(args), "kwargs": kwargs, "meta": like}


SCHEMAS = {
    "aten::add.Tensor": "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::clone.default": "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor",
    "aten::mul.Tensor": "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
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


GRAD = {"kind": "fresh", "requires_grad": True}
PLANE, ROW = meta(2, 3), meta(3)
golden_call(
    "storage_that_is_replaced",
    "10.6",
    "input_storage_replaced",
    "functional",
    WITHOUT,
    program="infer",
    edits=by_hand(
        "infer",
        {"mutations": [{"input_index": 0, "storage": True}], "outputs": [{"kind": "fresh"}]},
        {"input:x": PLANE, "input:y": PLANE},
        [node("mul", "mul.Tensor", "input:y", 2, like=PLANE)],
        ["input:y", "mul"],
    ),
)
golden_call(
    "history_of_a_changed_input",
    "10.8",
    "input_changed_with_gradients",
    "functional",
    CALL,
    backward("x", "output"),
    edits=by_hand(
        "train",
        {
            "mutations": [{"input_index": 0, "data": True, "requires_grad": True, "is_leaf": False}],
            "outputs": [GRAD],
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
    ),
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
                GRAD,
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
golden_call(
    "undefined_tangents_of_a_gradient_without_any",
    "10.22",
    "gradient_that_is_zero",
    "functional",
    CALL,
    backward(undefined=True),
    edits=[
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
    ],
)
