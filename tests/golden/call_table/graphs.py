"""Section 7: graphs."""

from tests.golden.call_table.by_hand import graph, meta, node
from tests.golden.call_table.row import BACKWARD, CALL, WITHOUT, backward, change, edit, golden_call

LOOKUP = "lookup_in_regions"
golden_call("call_that_fails_in_a_region", "7.7", LOOKUP, "functional", CALL, rows={"values": [2, 0, 3]})
golden_call("autocast_after_a_region", "7.9", "regions", "forward", WITHOUT)
golden_call("checkpointed_input_that_changed", "7.11", "checkpoint", "functional", CALL, change("w"), BACKWARD)
READS = "checkpoint_that_reads_state"
golden_call("checkpoint_that_reads_what_is_there_by_then", "7.11", READS, "forward", CALL, change("scale"), BACKWARD)
golden_call("checkpoint_that_draws_anew", "7.11", READS, "forward")
golden_call("loop_without_a_step_gives_copies", "7.14", "loop_without_a_step", "forward", WITHOUT)
golden_call("branch_that_is_not_taken", "7.14", "branches", "functional", x={"values": [-1.0, -2.0, 0.5, 0.25]})
golden_call("bodies_that_draw_again", "7.17", "bodies_that_draw", "functional")
FORWARD = "programs/train/forward.json"
DRAWS = [
    node("drawn", "rand_like.default", "row", like=meta(2)),
    node("mul", "mul.Tensor", "row", "drawn", like=meta(2)),
]
BELOW = {
    "name": "below",
    "op": "higher_order::invoke_subgraph",
    "args": [{"kind": "subgraph", "name": "draws"}, ["row"]],
    "meta": {"kind": "sequence", "items": [meta(2)]},
}
ITEM = {"name": "item", "op": "python::getitem", "args": ["below", 0], "meta": meta(2)}
ROW = {"row": meta(2)}
ABOVE = {**graph(ROW, [BELOW, ITEM], ["item"]), "subgraphs": {"draws": graph(ROW, DRAWS, ["mul"])}}
golden_call(
    "body_below_a_body_that_draws_again",
    "7.17",
    "bodies_that_draw",
    "functional",
    edits=[edit(FORWARD, ["subgraphs", "body_graph_0"], ABOVE)],
)
HOOK = {
    "name": "hook",
    "op": "higher_order::register_hook",
    "args": [{"kind": "subgraph", "name": "body0"}, "input:w", ["input:w"]],
    "meta": {"kind": "sequence", "items": []},
}
golden_call(
    "hook_of_a_tensor_without_gradient",
    "7.19",
    "tensor_hook",
    "functional",
    edits=[{"file": FORWARD, "at": ["nodes"], "append": HOOK}],
)
WRITES = "custom_function_that_writes"
golden_call("custom_function_with_all_gradients", "7.21", WRITES, "forward")
golden_call("custom_function_with_one_gradient", "7.21", WRITES, "forward", CALL, backward("output[0]"))
golden_call("custom_function_with_the_other_gradient", "7.21", WRITES, "forward", CALL, backward("output[1]"))
golden_call(
    "custom_function_that_is_differentiated_once", "7.21", WRITES, "forward", CALL, backward(of=["x", "y"], again=True)
)
