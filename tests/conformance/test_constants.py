"""Constants of the signature: which a call must repeat, and which a bundle cannot hold."""

import re

import numpy
import pytest
import torch
from torch import nn

import aotexport
from aotexport_runtime import CallInvalid
from tests.conformance.models import leaf


def test_zero_of_another_sign_is_refused(load):
    module = load(lambda x, n: x / n, torch.ones(2), 0.0)
    with pytest.raises(CallInvalid, match=r"`n`: expected 0\.0, as at capture, got -0\.0"):
        module(torch.ones(2), -0.0)


class WithDefault(nn.Module):
    def forward(self, x, y=torch.ones(2, 3)):  # noqa: B008 (what is tested)
        return x + y


def test_tensor_that_is_a_default_is_a_constant(load):
    module = load(WithDefault(), leaf(2, 3), verify=True)
    x = torch.randn(2, 3)
    assert torch.equal(module(x), x + 1)
    assert torch.equal(module.eval()(x), x + 1)
    with pytest.raises(CallInvalid, match="`y`: expected None, as at capture"):
        module(x, torch.zeros(2, 3))


class Labelled(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.label = "a"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (
            {torch.ones(2)},
            "input `other` is a set with a `torch.Tensor`; sets may hold numbers, strings, None and dtypes",
        ),
        (numpy.ones(2)[::-1], "`other` is an array of float64 with strides (-8,), which no tensor has; pass a copy"),
        (
            1 << 64,
            "input `other` is an integer of more than 64 bits, which a bundle cannot hold. Pass tensors, numbers",
        ),
        ("\ud800", "input `other` is the string '\\ud800', no Unicode text, which a bundle cannot hold. Pass tensors"),
        (Labelled(x=1), "is a `Labelled` with the attribute `label` beside its items, which a bundle does not look at"),
        ({float("inf"): torch.ones(2)}, "has the key inf; keys may be strings, numbers, bytes, booleans, None or"),
    ],
    ids=["set of tensors", "array", "large integer", "surrogate", "attribute", "key"],
)
def test_argument_that_a_bundle_cannot_hold_is_refused_with_a_way_out(load, argument, reason):
    with pytest.raises(aotexport.ExportFailed, match=re.escape(reason)):
        load(lambda x, other: x, leaf(3), argument)


def test_number_of_a_range_is_no_dynamic_integer(load):
    from tests.cases.structure import Scaling, enumeration_and_range

    shapes = (None, None, {"stop": torch.export.Dim("stop")})
    with pytest.raises(aotexport.AotExportError, match="dynamic_shapes: `exponents"):
        load(enumeration_and_range, leaf(3), Scaling.TWICE, range(1, 7, 3), dynamic_shapes=shapes)
