"""Structures of tensor subclasses: names, parts and contexts that do not hold together, and classes nobody gave."""

import json

import pytest
import torch
from torch import nn

import aotexport
from aotexport_runtime import BundleInvalid, NotSupported, load
from tests.hostile.crafted import FILES, Crafted
from tests.scaled import Block, Recipe, Rounding, ScaledInt8

TYPES = (Block, Recipe, Rounding, ScaledInt8)
NAME = "tests.scaled:ScaledInt8"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(ScaledInt8.of(torch.linspace(-1, 1, 8).reshape(2, 4)), requires_grad=False)

    def forward(self, x, y):
        return nn.functional.linear(x, self.weight) + y.integers.sum() + ScaledInt8.of(x).sum()


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundles") / "wrapped"
    x = torch.linspace(0, 1, 4).reshape(1, 4).requires_grad_()
    aotexport.export(Model(), (x, ScaledInt8.of(torch.ones(1, 4))), output=path, programs="train", verify=False)
    return path


@pytest.fixture
def crafted(wrapped, tmp_path):
    return Crafted(wrapped, tmp_path / "crafted")


SUBCLASS = "state/0/subclass/"
CONTEXT = SUBCLASS + "context"
FAULTS = [
    (
        "requirements/tensor_types",
        ["os:system('x')"],
        "`Requirements.tensor_types` \"os:system('x')\" is not the name of a class",
    ),
    (SUBCLASS + "attributes", ["integers", "integers"], "`Subclass.attributes` 'integers' occurs twice"),
    (SUBCLASS + "attributes", ["integers", "a.b"], f"an inner tensor of `{NAME}` has a malformed name"),
    (SUBCLASS + "attributes", ["integers"], "`Subclass.inner` has 2 items, and `Subclass.attributes` 1"),
    (SUBCLASS + "stride", [1], f"`{NAME}` has 2 sizes and 1 strides; at most 64 are read"),
    (SUBCLASS + "shape", [2, 5], "state 'weight' has another shape than its structure"),
    (SUBCLASS + "shape", ["s0", 4], "unknown symbol 's0' in a size"),
    (CONTEXT, {"kind": "leaf", "index": 0}, "leaf 0 of a tree is out of range"),
    (CONTEXT, {"kind": "constant", "value": "x"}, "a constant of a context is no constant"),
    (
        CONTEXT,
        {"kind": "named_fields", "type": "dataclass", "name": "A", "fields": [], "items": []},
        "a context holds what no context has",
    ),
    (CONTEXT + "/type", "os", "`Instance.type` 'os' is not the name of a class"),
    (CONTEXT + "/form", "enum", "a member of `tests.scaled:Recipe` has no name"),
    (CONTEXT + "/fields/0", "a b", "a field of `tests.scaled:Recipe` has a malformed name"),
    ("state/0/parts", [], "state 'weight' has 0 parts, not 2"),
    ("state/0/parts/0/file", "x", "`StoredPart.file` 'x' is not in `Manifest.files.path`"),
    ("state/0/parts/0/shape", [-2, 4], "state 'weight', part 'weight.integers' has negative sizes, strides or offset"),
    (
        "state/0/parts/1/stride",
        [4, 4],
        "state 'weight', part 'weight.scale' is said to be whole, and is not contiguous from its first element",
    ),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), FAULTS, ids=[f"{path}={value}"[:60] for path, value, _ in FAULTS]
)
def test_manifest_with_a_malformed_structure_is_refused(crafted, path, value, message):
    crafted.put("manifest", path, value)

    with pytest.raises(BundleInvalid) as error:
        crafted.read()

    assert str(error.value) == f"bundle.json: {message}"


PROGRAM = "programs/train/program.json"


@pytest.mark.parametrize(
    ("document", "path", "value", "message"),
    [
        ("program", "inputs/2/parts", [], "argument 'y' has 0 parts, not 2"),
        ("program", "inputs/2/subclass/shape", [1, 5], "argument 'y' has another shape than its structure"),
        ("program", "inputs/0/parts", [], "input 'weight' is not made of what the manifest's state says"),
        (
            "program",
            "inputs/0/subclass/context/fields/0",
            "x",
            "input 'weight' is not made of what the manifest's state says",
        ),
        ("program", "output_tree", "instance", "an object of `a:B` is no input or output"),
        ("forward", "subclasses", [], "builtin `subclass::wrap` takes no structure that the graph has"),
    ],
)
def test_program_with_a_malformed_structure_is_refused(crafted, document, path, value, message):
    if value == "instance":
        value = {"kind": "instance", "form": "enum", "type": "a:B", "fields": [], "items": []}
    crafted.put(document, path, value)

    with pytest.raises(BundleInvalid) as error:
        crafted.read()

    assert str(error.value) == f"{FILES[document]}: {message}"


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("subclass::inner", ["input:x", 1], "takes a string as operand 1"),
        ("subclass::inner", [1, {"kind": "string", "value": "a"}], "takes a tensor as operand 0"),
        ("subclass::wrap", [["input:x"], 0], "takes 2 tensors, got 1"),
        ("subclass::wrap", ["input:x", 0], "takes an array of tensors as operand 0"),
        ("subclass::wrap", [["input:x", "input:x"], True], "takes the index of a structure as operand 1"),
        ("subclass::wrap", [[]], "takes 2 operands, got 1"),
        ("distributed::to_local", [1, None], "takes a tensor as operand 0"),
        ("distributed::to_local", ["input:x", [0]], "takes an array of placements or null as operand 1"),
        ("distributed::redistribute", ["input:x", None, None, None], "takes an array of placements as operand 1"),
        ("distributed::redistribute", ["input:x", [], 1, None], "takes a dtype or null as operand 2"),
        ("distributed::from_local", ["input:x", 0, None], "takes the structure of a distributed tensor"),
        ("distributed::from_local", ["input:x", 7, None], "takes no structure that the graph has"),
        ("distributed::gather", ["input:x"], None),
    ],
)
def test_malformed_operator_on_subclasses_is_refused(crafted, op, args, message):
    crafted.node("forward", op=op, args=args)

    with pytest.raises(BundleInvalid) as error:
        crafted.read()

    fault = f"unknown builtin `{op}`" if message is None else f"builtin `{op}` {message}"
    assert str(error.value) == f"{FILES['forward']}: {fault}"


def test_inner_tensor_of_another_attribute_is_refused_when_called(crafted):
    x = torch.zeros(1, 4)
    crafted.node("forward", op="subclass::inner", args=["input:x", {"kind": "string", "value": "__class__"}])
    module = load(crafted.seal(), tensor_types=TYPES, target="autograd")

    with pytest.raises(BundleInvalid) as error:
        module(x, ScaledInt8.of(torch.ones(1, 4)))

    assert str(error.value) == "a value of type `Tensor` has no inner tensor '__class__'"


def test_class_that_the_manifest_hides_from_its_requirements_is_refused(crafted):
    crafted.put("manifest", "requirements/tensor_types", [])

    with pytest.raises(NotSupported) as error:
        load(crafted.seal())

    assert str(error.value) == (
        f"the bundle holds objects of the class `{NAME}`, which the caller did not give. Import it from "
        "`tests.scaled`, and pass it to `load` in `tensor_types`"
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("/type", "tests.scaled:Rounding", "`tests.scaled:Rounding` is here no dataclass with rounding, block, dtypes"),
        ("/fields/0", "other", "`tests.scaled:Recipe` is here no dataclass with other, block, dtypes"),
        ("/items/0/items/0/value/value", "UP", "`tests.scaled:Rounding` is here no enum with name"),
        ("/items/1/fields/0", "other", "`tests.scaled:Block` is here no namedtuple with other, columns"),
    ],
)
def test_context_that_does_not_fit_its_class_is_refused(crafted, path, value, message):
    crafted.put("manifest", CONTEXT + path, value)
    crafted.put("program", "inputs/0/subclass/context" + path, value)

    with pytest.raises(NotSupported) as error:
        load(crafted.seal(), tensor_types=TYPES)

    assert str(error.value) == f"{message} as at capture"


def test_class_that_wraps_no_tensors_is_refused(crafted):
    with pytest.raises(NotSupported) as error:
        load(crafted.seal(), tensor_types={**{f"tests.scaled:{t.__name__}": t for t in TYPES}, NAME: dict})

    assert str(error.value) == f"`{NAME}` is here no class that wraps tensors (`__tensor_unflatten__`)"


def test_vector_with_parts_beyond_its_span_is_refused(crafted):
    path = crafted.root / FILES["vector"]
    record = json.loads(path.read_text())
    record["inputs"][1]["parts"][0]["offset"] = 1000
    path.write_text(json.dumps(record))
    from aotexport_runtime import selftest

    with pytest.raises(BundleInvalid, match="argument 'y' reaches past the end of 'input1'"):
        selftest(crafted.seal(), tensor_types=TYPES)
