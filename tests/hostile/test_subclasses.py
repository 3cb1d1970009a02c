"""Structures of tensor subclasses: names, parts and contexts that do not hold together, and classes nobody gave."""

import json

import pytest
import torch
from torch import nn

from aotexport_runtime import BundleInvalid, NotSupported, load
from tests.hostile.crafted import FILES, Crafted
from tests.refusals import refusal
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
def wrapped(new_bundle):
    x = torch.linspace(0, 1, 4).reshape(1, 4).requires_grad_()
    return new_bundle(Model(), x, ScaledInt8.of(torch.ones(1, 4)), programs="train")


@pytest.fixture
def crafted(wrapped, tmp_path):
    return Crafted(wrapped, tmp_path / "crafted")


SUBCLASS = "state/0/subclass/"
CONTEXT = SUBCLASS + "context"


def test_inner_tensor_of_another_attribute_is_refused_when_called(crafted):
    x = torch.zeros(1, 4)
    crafted.node("forward", op="subclass::inner", args=["input:x", {"kind": "string", "value": "__class__"}])
    module = load(crafted.seal(), tensor_types=TYPES, target="autograd")
    said = refusal(BundleInvalid, module, x, ScaledInt8.of(torch.ones(1, 4)))
    assert said == "a value of type `Tensor` has no inner tensor '__class__'"


def test_class_that_the_manifest_hides_from_its_requirements_is_refused(crafted):
    crafted.put("manifest", "requirements/tensor_types", [])
    assert refusal(NotSupported, load, crafted.seal()) == (
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
    assert refusal(NotSupported, load, crafted.seal(), tensor_types=TYPES) == f"{message} as at capture"


def test_vector_with_parts_beyond_its_span_is_refused(crafted):
    path = crafted.root / FILES["vector"]
    record = json.loads(path.read_text())
    record["inputs"][1]["parts"][0]["offset"] = 1000
    path.write_text(json.dumps(record))
    from aotexport_runtime import selftest

    with pytest.raises(BundleInvalid, match="argument 'y' reaches past the end of 'input1'"):
        selftest(crafted.seal(), tensor_types=TYPES)
