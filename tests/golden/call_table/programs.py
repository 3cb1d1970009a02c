"""Section 8: calls of programs."""

from typing import Any

from tests.golden.call_table.row import (
    BACKWARD,
    CALL,
    GRAD,
    HOOKED,
    MOVED,
    NO_GRAD,
    NO_LEAF,
    PROGRAM,
    WITHOUT,
    edit,
    golden_call,
)
from tests.golden.refuse import TAKEN

REFUSED, INFER = "refused", {"program": "infer"}
IN_INFERENCE = {"call": False, "inference": True}


def constant(value: Any) -> dict[str, Any]:
    """Return what passes a plain value."""
    return {"constant": value}


# --- 8.2: bind --------------------------------------------------------------------------------------------

DEFAULTS = "passed_defaults"
golden_call(
    "argument_that_is_missing", "8.2", DEFAULTS, REFUSED, WITHOUT, **INFER, containers={"scale": {"absent": True}}
)
golden_call("argument_that_no_parameter_takes", "8.2", DEFAULTS, REFUSED, WITHOUT, **INFER, other=constant(1))
golden_call("argument_that_is_left_out", "8.2", DEFAULTS, "functional", WITHOUT, **INFER)
golden_call("argument_that_is_the_default", "8.2", DEFAULTS, "functional", WITHOUT, **INFER, bias=constant(1.0))
golden_call("argument_that_is_not_the_default", "8.2", DEFAULTS, REFUSED, WITHOUT, **INFER, bias=constant(2.0))

# --- 8.3: flatten -----------------------------------------------------------------------------------------

NESTED, PYTHON = "nested_inputs", "python_containers"
PAIR = {"pair.right": {"is": "x"}}
golden_call("constant_that_differs", "8.3", DEFAULTS, REFUSED, WITHOUT, **INFER, steps=constant(3))
golden_call("constant_of_another_type", "8.3", DEFAULTS, REFUSED, WITHOUT, **INFER, steps=constant(2.0))
golden_call("nested_arguments", "8.3", NESTED, "functional", **PAIR)
golden_call("zero_of_another_sign", "8.3", NESTED, REFUSED, **PAIR, **{"rest[0][1][4]": constant(0.0)})
golden_call("number_for_a_truth_value", "8.3", NESTED, REFUSED, **PAIR, **{"rest[0][1][1]": constant(1)})
golden_call("number_for_nan", "8.3", NESTED, REFUSED, **PAIR, **{"rest[0][1][6]": constant(1.0)})
golden_call("list_for_a_size", "8.3", NESTED, REFUSED, **PAIR, size=constant([2, 2]))
golden_call("list_of_another_length", "8.3", NESTED, REFUSED, **PAIR, containers={"rest[0][1]": {"more": 1}})
golden_call("keys_in_another_order", "8.3", NESTED, REFUSED, **PAIR, containers={"flags": {"reversed": True}})
golden_call(
    "keys_in_any_order",
    "8.3",
    "dict_read_by_key",
    "functional",
    containers={"batch": {"reversed": True}, "more": {"reversed": True}},
)
for name, graph, keys in (
    ("keys_that_are_equal_in_python", "functional", ["a", True, None, 0, ["user", True, None, 1]]),
    ("float_for_a_key", REFUSED, ["a", 1.0, None, False, ["user", 1, None, True]]),
    ("float_within_a_key", REFUSED, ["a", 1, None, False, ["user", 1.0, None, True]]),
):
    golden_call(name, "8.3", NESTED, graph, **PAIR, containers={"flags": {"keys": keys}})
IMAGINARY = {"rest[0][1][8]": {"complex": "-inf-0j"}}
golden_call("imaginary_zero_of_another_sign", "8.3", NESTED, REFUSED, **PAIR, **IMAGINARY)
FIELDS = {"kind": "named_fields", "type": "model_output", "name": "Batch", "fields": ["x", "scale"]}
ITEMS = [{"kind": "leaf", "index": 0}, {"kind": "leaf", "index": 1}]
golden_call(
    "mapping_for_named_fields",
    "8.3",
    "dict_read_by_key",
    "functional",
    edits=[edit(PROGRAM, ["parameters", 0, "tree"], {**FIELDS, "items": ITEMS})],
)
golden_call("fields_of_another_class", "8.3", NESTED, "functional", **PAIR, containers={"box": {"class": "Other"}})
golden_call(
    "object_of_another_class", "8.3", PYTHON, REFUSED, WITHOUT, **INFER, containers={"settings": {"class": "Other"}}
)
golden_call("fields_that_are_missing", "8.3", NESTED, REFUSED, **PAIR, box=constant(1))
golden_call(
    "plain_list_for_one_with_a_name", "8.3", "changed_containers", REFUSED, containers={"items": {"list": True}}
)
golden_call("deque_of_another_maximum", "8.3", PYTHON, REFUSED, WITHOUT, **INFER, containers={"kept": {"max_items": 3}})
golden_call("set_of_other_items", "8.3", PYTHON, REFUSED, WITHOUT, **INFER, containers={"seen": {"items": [5]}})
golden_call("tensor_for_an_array", "8.3", "numpy_arrays", REFUSED, WITHOUT, **INFER, containers={"x": {"tensor": True}})
golden_call("one_tensor_at_leaves_of_one_index", "8.3", "same_tensor_twice", "functional", b={"is": "a"})
golden_call("two_tensors_at_leaves_of_one_index", "8.3", "same_tensor_twice", REFUSED, b={"copy": "a"})
golden_call("parameter_that_is_the_modules", "8.3", "argument_is_parameter", "functional", args1={"is": "w"})
golden_call("parameter_that_is_not_the_modules", "8.3", "argument_is_parameter", REFUSED, args1={"copy": "w"})
golden_call(
    "changed_container_in_two_places",
    "8.3",
    "list_beside_another",
    REFUSED,
    WITHOUT,
    **INFER,
    containers={"read": {"is": "kept"}},
)

# --- 8.4: hard guards -------------------------------------------------------------------------------------

golden_call("number_for_a_tensor", "8.4", "linear", REFUSED, input=constant(1))
golden_call("another_dtype", "8.4", "linear", REFUSED, input={"dtype": "float64"})
golden_call("another_rank", "8.4", "dynamic_sizes", REFUSED, x={"shape": [4]})
golden_call("another_device", "8.4", "linear", REFUSED, input={"device": "meta"})
golden_call("another_layout", "8.4", "linear", REFUSED, input={"sparse": True})
golden_call("another_size", "8.4", "linear", REFUSED, input={"shape": [5, 3]})
golden_call("truth_value_for_an_integer", "8.4", "dynamic_integer", REFUSED, n=constant(True))
golden_call("float_for_an_integer", "8.4", "dynamic_integer", REFUSED, n=constant(3.0))
golden_call("size_below_the_least", "8.4", "size_output", REFUSED, x={"shape": [1, 3]})
golden_call("size_above_the_greatest", "8.4", "size_output", REFUSED, x={"shape": [10, 3]})
golden_call("size_within_the_range", "8.4", "size_output", "functional", x={"shape": [9, 3]})
golden_call("sizes_against_a_guard", "8.4", "dynamic_sizes", REFUSED, x={"shape": [4, 4]}, y={"shape": [9, 4]})
FACTOR: Any = TAKEN["size_that_is_read_by_factor_and_offset"]["edits"]
golden_call(
    "size_that_is_no_multiple", "8.4", "dynamic_sizes", REFUSED, edits=FACTOR, x={"shape": [4, 6]}, y={"shape": [10, 6]}
)
INSIDE = "gradients_taken_inside"
golden_call("input_to_differentiate_with_hooks", "8.4", INSIDE, REFUSED, x=HOOKED)
golden_call("input_to_differentiate_that_retains", "8.4", INSIDE, REFUSED, x={**NO_LEAF, "retain_grad": True})
golden_call("input_to_differentiate_without_gradient", "8.4", INSIDE, REFUSED, x=NO_GRAD)
ASKS = "code_that_asks_for_gradients"
golden_call("question_with_another_answer", "8.4", ASKS, REFUSED, y=NO_GRAD)
golden_call("question_of_every_call", "8.4", ASKS, REFUSED, WITHOUT, y=NO_GRAD)
golden_call("question_of_calls_that_record", "8.4", ASKS, REFUSED, x=GRAD)
golden_call("question_of_calls_that_record_in_another", "8.4", ASKS, "forward", WITHOUT, x=GRAD)
UNTIED = {"replace": "head.weight", "of": "embedding.weight"}
golden_call("names_that_are_tied_no_longer", "8.4", "tied_weights", REFUSED, UNTIED, CALL)

# --- 8.5 to 8.10 ------------------------------------------------------------------------------------------

golden_call("number_for_a_mapping", "8.3", "dict_read_by_key", REFUSED, batch=constant(1))
golden_call("state_that_was_replaced", "8.5", "linear", "functional", {"replace": "0.weight"}, CALL, BACKWARD)
golden_call("state_that_the_call_replaces", "8.8", "rebound_buffer", "forward", CALL, CALL)
golden_call(
    "items_that_stay", "8.9", "changed_containers", "functional", CALL, BACKWARD, seen=["items", "table", "box"]
)
golden_call("containers_of_python", "8.9", PYTHON, "functional", WITHOUT, **INFER, seen=["kept", "settings", "seen"])
golden_call("classes_of_results", "8.10", "nested_outputs", "functional", WITHOUT, **INFER)

# --- 9.3: forward graphs that are not differentiable -------------------------------------------------------

NO_BACKWARD = "custom_function_by_the_joint_graph"
golden_call("forward_graph_without_backward", "9.3", NO_BACKWARD, "forward", WITHOUT)
golden_call("forward_graph_without_backward_for_no_gradient", "9.3", NO_BACKWARD, "forward", CALL, x=NO_GRAD)

# --- 8.12: facts that code reads --------------------------------------------------------------------------

READS, LEAVES = "python_that_reads_tensors", "code_that_reads_is_leaf"
golden_call("strides_that_code_reads", "8.12", READS, REFUSED, x={"stride": [1, 2]})
golden_call("offset_that_code_reads", "8.12", READS, REFUSED, x=MOVED)
golden_call("requires_grad_that_code_reads", "8.12", READS, REFUSED, x=GRAD)
golden_call("grad_mode_that_code_reads", "8.12", READS, REFUSED, WITHOUT)
golden_call("is_leaf_that_code_reads", "8.12", LEAVES, REFUSED, x=NO_LEAF)
golden_call("identity_that_code_reads", "8.12", INSIDE, REFUSED, y={"is": "x"})
golden_call("inference_mode_that_nothing_reads", "8.12", "linear", "functional", IN_INFERENCE, **INFER)
golden_call("inference_mode_that_code_reads", "8.12", INSIDE, REFUSED, {"call": True, "inference": True})
CAST = "captured_under_autocast"
golden_call("autocast_that_code_reads", "8.12", CAST, REFUSED)
golden_call("autocast_as_at_capture", "8.12", CAST, "forward", {"call": True, "autocast": "bfloat16"})
