"""Builtin calls: arithmetic without bound, items out of range, regions of interpreter state left open."""

import pytest

from tests.hostile.crafted import Crafted

WHERE = "programs/train/forward.json"
SIZE = {"kind": "size"}
CPU = {"kind": "device", "type": "cpu"}
BFLOAT = {"kind": "dtype", "value": "bfloat16"}
NOTHING = {"kind": "nothing"}
LITTLE = "takes a number as operand 0"
BODY = {"kind": "subgraph", "name": "body"}
FUNCTION = "higher_order::autograd_function"

FAULTS = [
    ("python::pow", [10, 10**9], "raises an integer to a power that is no integer from -64 to 64"),
    ("python::pow", [10, "size"], "raises an integer to a power that is no integer from -64 to 64"),
    ("python::pow", ["size", 64], "may give numbers of more than 1024 bits"),
    ("python::mul", [[0], 10**10], LITTLE),
    ("python::mul", [{"kind": "string", "value": "a"}, 10**10], LITTLE),
    ("python::mul", ["max_1", 10**10], LITTLE),
    ("python::mod", [{"kind": "string", "value": "%9999999999d"}, 1], LITTLE),
    ("python::add", ["linear", 1], LITTLE),
    ("python::add", [None, 1], LITTLE),
    ("python::add", [1], "takes 2 operands, got 1"),
    ("python::add", [1, 2, 3], "takes 2 operands, got 3"),
    ("python::neg", [], "takes 1 operands, got 0"),
    ("python::sym_ite", [True, 1], "takes 3 operands, got 2"),
    ("python::sym_sum", [1], "takes an array of numbers as operand 0"),
    ("python::sym_sum", [["linear"]], "takes an array of numbers as operand 0"),
    ("python::sym_int", [{"kind": "string", "value": "9"}], LITTLE),
    ("python::getitem", ["max_1", 2], "takes item 2 of a sequence of 2"),
    ("python::getitem", ["max_1", -3], "takes item -3 of a sequence of 2"),
    ("python::getitem", ["max_1", True], "takes an integer or a slice as operand 1"),
    ("python::getitem", ["max_1", "size"], "takes an integer or a slice as operand 1"),
    (
        "python::getitem",
        ["max_1", {"kind": "string", "value": "__class__"}],
        "takes an integer or a slice as operand 1",
    ),
    ("python::getitem", ["linear", 0], "takes a sequence as operand 0"),
    ("python::getitem", [[1, 2], 0], "takes a sequence as operand 0"),
    ("torch::set_grad_enabled", ["linear"], "takes a grad mode as operand 0"),
    ("torch::set_grad_enabled", [{"kind": "string", "value": "x"}], "takes a grad mode as operand 0"),
    ("torch::is_grad_enabled", [1], "takes 0 operands, got 1"),
    ("torch::enter_autocast", [0, BFLOAT, True, True], "takes a device as operand 0"),
    ("torch::enter_autocast", [CPU, 15, True, True], "takes a dtype or null as operand 1"),
    ("torch::enter_autocast", [CPU, BFLOAT, 1, True], "takes a truth value as operand 2"),
    ("torch::enter_checkpoint", [[7], True], "takes an array of tensors as operand 0"),
    ("torch::enter_checkpoint", [[], 1], "takes a truth value as operand 1"),
    (FUNCTION, [BODY], "takes 10 operands, got 1"),
    (FUNCTION, [None, [BODY], [], [], 1, 0, [], [], True, False], "takes a body as operand 0"),
    (FUNCTION, [BODY, ["linear"], [], [], 1, 0, [], [], True, False], "takes an array of bodies and null as operand 1"),
    (FUNCTION, [BODY, [BODY], "linear", [], 1, 0, [], [], True, False], "takes an array as operand 2"),
    (FUNCTION, [BODY, [BODY], [], [], -1, 0, [], [], True, False], "takes a count as operand 4"),
    (FUNCTION, [BODY, [BODY], [], [], 1, 0, [], [], 1, False], "takes a truth value as operand 8"),
    (FUNCTION, [BODY, [BODY], [], [], 1, 0, [0], [], True, False], "takes indices of its operands and outputs"),
    (FUNCTION, [BODY, [BODY], [], [], 1, 0, [], [0, 0], True, False], "takes an array of indices as operand 7"),
    (FUNCTION, [BODY, [BODY], [], [], 2, 0, [], [], False, False], "takes 4 subgraphs of its backward, got 1"),
    ("higher_order::triton_kernel", ["linear", []], "takes a string as operand 0"),
    (
        "higher_order::triton_kernel",
        [{"kind": "string", "value": "k"}, ["size"]],
        "takes an array of tensors as operand 1",
    ),
    ("higher_order::register_hook", ["linear", "linear", []], "takes a body as operand 0"),
    ("higher_order::register_hook", [BODY, "size", []], "takes a tensor as operand 1"),
    ("higher_order::register_hook", [BODY, "linear", "linear"], "takes an array as operand 2"),
    ("higher_order::invoke_subgraph", [BODY, "linear"], "takes an array as operand 1"),
    ("torch::exit_autocast", ["linear"], "leaves a region that is not the innermost one"),
]


@pytest.mark.parametrize(("op", "args", "reason"), FAULTS, ids=[f"{op}:{reason[:40]}" for op, _, reason in FAULTS])
def test_builtin_with_unsound_operands_is_refused(crafted: Crafted, op, args, reason):
    crafted.node("forward", name="size", op="aten::sym_size.int", args=["linear", 0], meta=SIZE)
    crafted.node("forward", op=op, args=args, meta=SIZE)
    crafted.subgraph("forward", "body")
    assert crafted.refusal() == f"{WHERE}: builtin `{op}` {reason}"


def test_builtin_with_keywords_is_refused(crafted: Crafted):
    crafted.node("forward", op="python::add", args=[1], kwargs={"other": 2})
    assert crafted.refusal() == f"{WHERE}: builtin `python::add` takes 2 operands, got 2"


def test_repeated_squaring_is_refused(crafted: Crafted):
    crafted.node("forward", name="n0", op="aten::sym_size.int", args=["linear", 0], meta=SIZE)
    for step in range(5):
        crafted.node("forward", name=f"n{step + 1}", op="python::mul", args=[f"n{step}"] * 2, meta=SIZE)
    assert crafted.refusal() == f"{WHERE}: builtin `python::mul` may give numbers of more than 1024 bits"


def test_autocast_region_that_is_not_left_is_refused(crafted: Crafted):
    crafted.node("forward", op="torch::enter_autocast", args=[CPU, BFLOAT, True, True], meta=NOTHING)
    assert crafted.refusal() == f"{WHERE}: a region is not left"


def test_autocast_regions_that_are_left_in_the_wrong_order_are_refused(crafted: Crafted):
    for name in ("outer", "inner"):
        crafted.node("forward", name=name, op="torch::enter_autocast", args=[CPU, BFLOAT, True, True], meta=NOTHING)
    crafted.node("forward", op="torch::exit_autocast", args=["outer"], meta=NOTHING)
    message = "builtin `torch::exit_autocast` leaves a region that is not the innermost one"
    assert crafted.refusal() == f"{WHERE}: {message}"


def test_checkpointed_part_within_another_is_refused(crafted: Crafted):
    for name in ("outer", "inner"):
        crafted.node("forward", name=name, op="torch::enter_checkpoint", args=[[], True], meta=NOTHING)
    assert crafted.refusal() == f"{WHERE}: builtin `torch::enter_checkpoint` begins within another"


def test_region_that_another_kind_of_operator_ends_is_refused(crafted: Crafted):
    crafted.node("forward", name="part", op="torch::enter_checkpoint", args=[[], True], meta=NOTHING)
    crafted.node("forward", op="torch::exit_autocast", args=["part"], meta=NOTHING)
    message = "builtin `torch::exit_autocast` leaves a region that is not the innermost one"
    assert crafted.refusal() == f"{WHERE}: {message}"


def test_functional_graph_that_changes_the_interpreter_is_refused(crafted: Crafted):
    crafted.node("joint", op="torch::set_grad_enabled", args=[False], meta=NOTHING)
    message = "`torch::set_grad_enabled` changes the state of the interpreter; a functional graph may not"
    assert crafted.refusal() == f"programs/train/joint.json: {message}"
