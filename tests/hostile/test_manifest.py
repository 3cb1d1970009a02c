"""The manifest: names, references and numbers that do not hold together."""

import pytest
from msgspec.structs import replace

from aotexport_runtime import BundleInvalid, BundleTooNew, load
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, ForwardGraph, Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate.manifest import check_onnx
from tests.hostile.crafted import Crafted

DIGEST = "0" * 64
ENTRY = {"path": "a", "nbytes": 0, "sha256": DIGEST}
STATE = {"name": "w", "role": "parameter", "file": "weights/model.safetensors", "key": "linear.bias"}
STATE |= {"dtype": "float32", "shape": [3], "stride": [1]}
VECTOR = {"program": "train", "name": "one", "record": "README.md", "tensors": "README.md"}
ANCESTOR = {"name": "Net", "sha256": DIGEST}
ESCAPE = "\x1b[2J"

FAULTS = [
    ("programs", [], "`Manifest.programs` has 0 items; at least 1 must be there"),
    ("programs/-", {"name": "train"}, "`ProgramEntry.name` 'train' occurs twice"),
    ("programs/-", {"name": "../train"}, "`ProgramEntry.name` '../train' is not a plain name"),
    ("files/0/nbytes", -1, "`FileEntry.nbytes` is -1; at least 0 is expected"),
    ("programs/0/variant_of", "train", "program `train` is a variant of no program before it"),
    ("programs/-", {"name": "other", "variant_of": "x"}, "program `other` is a variant of no program before it"),
    ("state/-", {**STATE, "name": "linear.bias"}, "state tensor 'linear.bias' occurs twice"),
    ("state/-", {**STATE, "tied": ["calls"]}, "state tensor 'calls' occurs twice"),
    ("state/-", {**STATE, "name": "linear"}, "'linear' is the name of a state tensor and of a module"),
    ("settings", {"linear": None}, "attribute 'linear' is listed as something else as well"),
    ("settings", {"linear.bias": None}, "attribute 'linear.bias' is listed as something else as well"),
    ("state/-", {**STATE, "name": "a..b"}, "state name 'a..b' is malformed"),
    ("state/-", {**STATE, "name": "a.__dict__"}, "state name 'a.__dict__' is malformed"),
    ("state/-", {**STATE, "name": ".".join("a" * 65)}, f"state name {'.'.join('a' * 65)[:80]!r} is malformed"),
    ("state/-", {**STATE, "name": ESCAPE}, r"state name '\x1b[2J' is too long or not printable"),
    ("state/-", {**STATE, "file": "a"}, "state 'w' is in a file that is not listed: 'a'"),
    ("state/-", {**STATE, "stride": []}, "state 'w' has 1 sizes and 0 strides; at most 64 are read"),
    (
        "state/-",
        {**STATE, "shape": [1] * 65, "stride": [1] * 65},
        "state 'w' has 65 sizes and 65 strides; at most 64 are read",
    ),
    ("state/-", {**STATE, "shape": [-3]}, "state 'w' has negative sizes, strides or offset"),
    ("state/-", {**STATE, "stride": [-1]}, "state 'w' has negative sizes, strides or offset"),
    ("state/-", {**STATE, "offset": -1}, "state 'w' has negative sizes, strides or offset"),
    (
        "state/-",
        {**STATE, "shape": [2**40, 2**40], "stride": [0, 0], "whole": False},
        "state 'w' has sizes, strides or offset beyond 64 bits",
    ),
    (
        "state/-",
        {**STATE, "shape": [2, 0], "stride": [2**70, 1], "whole": False},
        "state 'w' has sizes, strides or offset beyond 64 bits",
    ),
    (
        "state/-",
        {**STATE, "shape": [2**33], "stride": [2**33], "whole": False},
        "state 'w' has sizes, strides or offset beyond 64 bits",
    ),
    ("state/-", {**STATE, "offset": 1}, "state 'w' is said to be whole, and is not contiguous from its first element"),
    (
        "state/-",
        {**STATE, "shape": [3, 1, 2], "stride": [1, 9, 3]},
        "state 'w' is said to be whole, and is not contiguous from its first element",
    ),
    ("state/2/requires_grad", True, "state 'calls' is int64 and cannot require grad"),
    ("ancestors", [{**ANCESTOR, "child": 0}], "the ancestor 'Net' has a child that is not before it"),
    ("testvectors/-", {**VECTOR, "program": "x"}, "`VectorEntry.program` 'x' is not in `Manifest.programs.name`"),
    (
        "calling_convention",
        2,
        "calling convention 2 is not known to this runtime, which implements 1 to 1. "
        "Install the aotexport-runtime that fits, or export the model again",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS, ids=[f"{p}:{m[:40]}" for p, _, m in FAULTS])
def test_manifest_with_a_fault_is_refused(crafted: Crafted, path, value, message):
    crafted.document("manifest")["files"].insert(0, {**ENTRY, "path": "missing"})
    crafted.put("manifest", path, value)
    assert crafted.refusal() == f"bundle.json: {message}"


@pytest.mark.parametrize(
    ("format_", "min_reader", "message"),
    [
        ("1", "1.0", "expected a version `MAJOR.MINOR`, got '1'"),
        ("1.0", "1.0.0", "expected a version `MAJOR.MINOR`, got '1.0.0'"),
        ("9" * 5000 + ".0", "1.0", f"expected a version `MAJOR.MINOR`, got '{'9' * 20}'"),
        ("1.0", "-1.0", "expected a version `MAJOR.MINOR`, got '-1.0'"),
        ("1.0", "\u0661.\u0660", "expected a version `MAJOR.MINOR`, got '\u0661.\u0660'"),
    ],
)
def test_manifest_with_a_malformed_version_is_refused(crafted: Crafted, format_, min_reader, message):
    crafted.put("manifest", "format", format_)
    crafted.put("manifest", "min_reader", min_reader)
    assert crafted.refusal() == f"bundle.json: {message}"


def test_manifest_of_a_newer_format_is_refused_before_its_fields_are_looked_at(crafted: Crafted):
    crafted.put("manifest", "min_reader", "7.3")
    crafted.put("manifest", "field_of_the_future", {"anything": 1})
    with pytest.raises(BundleTooNew) as caught:
        crafted.read()
    assert (caught.value.needed, caught.value.supported) == ((7, 3), (1, 1))


def test_bundle_that_was_only_copied_and_sealed_still_loads_and_runs(crafted: Crafted):
    import torch

    crafted.read()
    module = load(crafted.root)
    assert module(torch.ones(3, 4))["turned"].shape == (4, 3)


META = TensorMeta(dtype="float32", shape=(2,), stride=(1,))
PROGRAM = Program(
    name="infer",
    mode="eval",
    grad=False,
    parameters=(),
    inputs=(ArgumentInput(path="x", meta=META), StateInput(name="calls", meta=META)),
    outputs=(META,),
    output_tree=Leaf(index=0),
    forward=ForwardGraph(file="forward.json"),
)
MODEL = OnnxModel(
    program="infer",
    file="infer.onnx",
    opset=18,
    inputs=("x",),
    outputs=("y", "calls.1", "holds"),
    updates=("calls",),
    checks=("x is positive",),
)


@pytest.mark.parametrize("updates", [("calls",), ("x",)])
def test_model_of_onnx_returns_outputs_changes_and_checks(updates):
    check_onnx(replace(MODEL, updates=updates), PROGRAM, where=Place("bundle.json"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": ()}, "0 inputs and 3 outputs, and program `infer` has 1 and 3"),
        ({"outputs": ("y",)}, "1 inputs and 1 outputs, and program `infer` has 1 and 3"),
        ({"checks": ()}, "1 inputs and 3 outputs, and program `infer` has 1 and 2"),
        ({"updates": ("y",)}, "the model changes 'y', which is no one input"),
    ],
)
def test_model_of_onnx_that_does_not_fit_its_program_is_refused(fields, message):
    with pytest.raises(BundleInvalid) as caught:
        check_onnx(replace(MODEL, **fields), PROGRAM, where=Place("bundle.json"))
    assert caught.value.reason == message
