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


def test_other_member_of_an_enumeration_or_other_range_is_refused(load):
    from tests.cases.structure import Scaling, enumeration_and_range

    module = load(enumeration_and_range, leaf(3), Scaling.TWICE, range(1, 7, 3))
    x = leaf(3)
    assert torch.equal(module(x, Scaling.TWICE, range(1, 7, 3)), enumeration_and_range(x, Scaling.TWICE, (1, 4)))
    with pytest.raises(CallInvalid, match=r"`scaling\.name`: expected 'TWICE', as at capture, got 'NEVER'"):
        module(x, Scaling.NEVER, range(1, 7, 3))
    with pytest.raises(CallInvalid, match=r"`exponents`: expected range\(1, 7, 3\), as at capture, got "):
        module(x, Scaling.TWICE, range(1, 8, 3))


def test_other_set_is_refused(load):
    from tests.cases.structure import sets_and_tuple_keys

    edges = {("user", "rates"): leaf(3), ("user", 1): leaf(3)}
    module = load(sets_and_tuple_keys, leaf(3), {"twice", 3, None}, edges)
    for other in ({"twice", 3}, {"twice", 3.0, None}, frozenset(("twice", 3, None))):
        with pytest.raises(CallInvalid, match=r"`flags`: expected {.*}, as at capture, got "):
            module(leaf(3), other, edges)
    with pytest.raises(CallInvalid, match="`edges`: expected a dict with keys"):
        module(leaf(3), {"twice", 3, None}, {("user", "rates"): leaf(3), ("user", 2): leaf(3)})


def test_other_keys_and_classes_of_sequences_are_refused(load):
    from tests.cases.structure import Boxes, numbers_and_bytes_as_keys

    table = {0.5: torch.ones(3), b"ab": torch.ones(3), (1.0, b""): torch.ones(3)}
    module = load(numbers_and_bytes_as_keys, leaf(3), table, Boxes([torch.ones(3), torch.ones(3)]))
    with pytest.raises(CallInvalid) as caught:
        module(leaf(3), {0.5: leaf(3), b"": leaf(3), (1.0, b""): leaf(3)}, [leaf(3), leaf(3)])
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `table`: expected a dict with keys [0.5, b'ab', (1.0, b'')] in this order; missing: b'ab'; "
        "unexpected: b''\n"
        "  - `boxes`: expected a Boxes of 2, got a list of 2"
    )
    one = load(lambda table: table[(1,)] * 2, {(1,): torch.ones(2)}, force=True)
    with pytest.raises(CallInvalid, match=r"keys \[\(1,\)\] in this order, got a dict with keys \[\(1\.0,\)\]"):
        one({(1.0,): torch.ones(2)})


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
