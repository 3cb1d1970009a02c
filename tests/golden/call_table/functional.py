"""Section 10: functional graphs."""

from tests.golden.call_table.row import (
    BACKWARD,
    CALL,
    COLUMNS,
    FUNCTIONAL,
    GRAD,
    HOOKED,
    LEAF,
    MOVED,
    NO_GRAD,
    NO_LEAF,
    PROGRAM,
    WITHOUT,
    backward,
    change,
    edit,
    golden_call,
)

# --- 10.3: soft guards ------------------------------------------------------------------------------------

RELIES = "results_that_rely_on_different_inputs"
UNDONE = "changes_that_undo_each_other"
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
golden_call(
    "input_of_inference_that_requires_grad", "10.3", "linear", "functional", WITHOUT, program="infer", input=GRAD
)
golden_call(
    "offset_of_an_input_that_only_turns",
    "10.3",
    "input_metadata_mutated",
    "functional",
    WITHOUT,
    program="infer",
    x=MOVED,
)
golden_call("changed_leaf_that_was_none", "10.3", "input_data_mutated", "forward", z=LEAF)
golden_call("changed_leaf_that_is_none", "10.3", "input_data_mutated", "forward", w=NO_LEAF)
golden_call(
    "changed_input_of_inference_that_is_no_leaf",
    "10.3",
    UNDONE,
    "functional",
    WITHOUT,
    program="infer",
    y={**GRAD, **NO_LEAF},
)
golden_call("hooks_that_some_tangents_reach", "10.3", RELIES, "forward", y=HOOKED)
golden_call("hooks_that_all_tangents_reach", "10.3", RELIES, "functional", x=HOOKED)
golden_call("one_tensor_for_two_arguments", "10.3", "backward_passes_that_repeat", "functional", y={"is": "x"})
golden_call("memory_shared_with_a_changed_input", "10.3", "input_data_mutated", "forward", y={"key": "input0"})
golden_call(
    "storages_that_overlap",
    "10.3",
    UNDONE,
    "forward",
    WITHOUT,
    program="infer",
    x={"values": [1.0, 2.0, 3.0, 4.0, 5.0]},
    y={"key": "input0", "begins": 1},
)
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
golden_call("versions_of_changes_that_undo_each_other", "10.9", UNDONE, "functional", CALL)
golden_call(
    "input_that_turns_without_grad_mode",
    "10.7",
    "input_metadata_mutated",
    "functional",
    WITHOUT,
    backward("x"),
    program="infer",
    edits=[edit("programs/infer/program.json", [FUNCTIONAL, "mutations", 0, "under_no_grad"], False)],
    x={**GRAD, **NO_LEAF},
)

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
golden_call(
    "view_without_grad_mode",
    "10.12",
    "more_views_of_input",
    "functional",
    WITHOUT,
    backward("output[6]"),
    program="infer",
    x=GRAD,
)
golden_call("view_without_gradients", "10.12", "view_under_no_grad", "functional")
RETAINED = {"retain": ["output[0]"]}
golden_call(
    "gradient_of_a_returned_base", "10.12", "view_of_output", "functional", CALL, RETAINED, backward("output[1]")
)
RETURNED = "view_of_returned_view"
VIEWS = (CALL, {"retain": [f"output[{index}]" for index in range(4)]}, backward("output[1]", "output[3]"))
golden_call("gradients_of_returned_views", "10.14", RETURNED, "functional", *VIEWS)
for number, which in enumerate(("base", "view")):
    golden_call(
        f"gradients_of_returned_views_by_a_{which}_without_steps",
        "10.14",
        RETURNED,
        "functional",
        *VIEWS,
        edits=[edit(PROGRAM, [FUNCTIONAL, "outputs", number, "steps"], None)],
    )
WAY = "views_on_the_way_to_others"
golden_call("views_that_others_do_not_go_through", "10.14", WAY, "functional")
TURNS = "view_that_turns_back"
golden_call("view_that_turns_back", "10.14", TURNS, "functional")
SQUARE = {"op": "aten::view.default", "args": [[2, 2]]}
golden_call(
    "steps_that_another_view_does_not_begin",
    "10.14",
    TURNS,
    "functional",
    edits=[edit(PROGRAM, [FUNCTIONAL, "outputs", 1, "steps"], [SQUARE])],
)
golden_call("view_of_an_input_that_requires_no_grad_now", "10.13", WAY, "functional", x=NO_GRAD)
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
golden_call("change_that_needed_gradients_read", "10.20", RELIES, "functional", CALL, change("z"), BACKWARD, y=NO_GRAD)
golden_call(
    "change_that_no_saved_value_shows", "10.20", "view_of_mutated_input", "functional", CALL, change("x"), BACKWARD
)
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
