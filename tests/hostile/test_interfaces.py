"""Graphs that do not take what their program passes, or do not return what it says."""

import pytest

from tests.hostile.crafted import Crafted

GRADIENTS = "functional/gradients"
SAVED = f"{GRADIENTS}/partitions/0/saved"
UNCHECKED = f"{GRADIENTS}/partitions/0/unchecked"
TENSOR = {"kind": "tensor", "dtype": "float32", "shape": [3], "stride": [1]}


@pytest.mark.parametrize(
    ("graph", "message"), [("forward", "5 inputs; the program passes 4"), ("joint", "6 inputs; the program passes 5")]
)
def test_graph_with_a_further_input_is_refused(crafted: Crafted, graph, message):
    crafted.put(graph, "inputs/-", {"name": "more", "meta": TENSOR})
    assert crafted.refusal() == f"programs/train/{graph}.json: {message}"


@pytest.mark.parametrize("meta", [{**TENSOR, "dtype": "int64"}, {**TENSOR, "shape": [4]}])
@pytest.mark.parametrize("graph", ["forward", "joint"])
def test_graph_with_another_input_than_the_program_passes_is_refused(crafted: Crafted, graph, meta):
    crafted.put(graph, "inputs/1/meta", meta)
    assert crafted.refusal() == f"programs/train/{graph}.json: input 1 of the graph is not what the program passes"


def test_joint_graph_with_another_tangent_is_refused(crafted: Crafted):
    crafted.put("joint", "inputs/4/meta/shape/0", 7)
    assert crafted.refusal() == "programs/train/joint.json: input 4 of the graph is not what the program passes"


def test_forward_graph_that_returns_another_number_of_outputs_is_refused(crafted: Crafted):
    crafted.put("forward", "outputs/-", None)
    assert crafted.refusal() == "programs/train/forward.json: 4 outputs for the program's 3"


def test_joint_graph_that_returns_too_few_outputs_is_refused(crafted: Crafted):
    crafted.put("joint", "outputs", [])
    assert crafted.refusal() == "programs/train/joint.json: 0 outputs; the calling convention has 4"


def test_inference_graph_that_returns_gradients_is_refused(crafted: Crafted):
    crafted.put("program", GRADIENTS, None)
    inputs = crafted.document("joint")["inputs"][:4]
    crafted.put("joint", "inputs", inputs)
    crafted.put("joint", "nodes", [])
    crafted.put("joint", "outputs", [*(each["name"] for each in inputs), None])
    assert crafted.refusal() == "programs/train/joint.json: 5 outputs; the calling convention has 4"


@pytest.mark.parametrize("index", [0, 2], ids=["mutation", "alias"])
def test_constant_in_place_of_a_tensor_of_an_epilogue_is_refused(crafted: Crafted, index):
    place = {0: 0, 2: 3}[index]
    crafted.put("joint", f"outputs/{place}", 7)
    assert crafted.refusal() == f"programs/train/joint.json: output {place} of the graph is no value"


@pytest.mark.parametrize("index", [-1, 0, 3, 8])
def test_gradient_that_is_no_gradient_output_is_refused(crafted: Crafted, index):
    crafted.put("program", f"{GRADIENTS}/of_inputs/0", index)
    below = "`Gradients.of_inputs` is -1; at least 0 is expected"
    message = below if index < 0 else f"gradient {index} is not among the outputs 4 to 7"
    assert crafted.refusal() == f"programs/train/program.json: {message}"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (SAVED, ["nothing"], "saved value 'nothing' is not in the graph"),
        (SAVED, ["t", "t"], "`Partition.saved` 't' occurs twice"),
        (SAVED, ["tangent:0"], "saved value 'tangent:0' needs an incoming gradient"),
        (SAVED, ["mm"], "saved value 'mm' needs an incoming gradient"),
        (UNCHECKED, ["t"], "`Partition.unchecked` 't' is not in `Partition.saved`"),
    ],
)
def test_partition_that_saves_what_it_cannot_is_refused(crafted: Crafted, path, value, message):
    crafted.put("program", path, value)
    assert crafted.refusal() == f"programs/train/program.json: {message}"


def test_forward_output_that_needs_a_tangent_is_refused(crafted: Crafted):
    crafted.put("joint", "outputs/1", "view")
    assert crafted.refusal() == "programs/train/joint.json: an output of the forward needs an incoming gradient"
