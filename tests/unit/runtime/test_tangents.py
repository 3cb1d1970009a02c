"""Gradients of outputs: libraries read them in the layout and dtype of the capture, whatever a caller gives."""

import pytest
import torch

from aotexport_runtime.engines.functional.tangents import layout, zeros
from aotexport_runtime.schema.program import Tangent
from aotexport_runtime.schema.values import TensorMeta

GIVEN = {
    "as captured": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(3, 2).t(),
    "expanded": torch.ones(()).expand(2, 3),
    "every other": torch.arange(12.0).reshape(2, 6)[:, ::2],
    "of another dtype": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t().contiguous().t(),
}


def tangent(stride=None, memory_format=None):
    meta = TensorMeta(dtype="float32", shape=(2, 3), stride=(3, 1), device="cpu")
    return Tangent(of="output", index=0, meta=meta, stride=stride, memory_format=memory_format)


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize(
    ("spec", "stride"),
    [
        (tangent(memory_format="contiguous_format"), (3, 1)),
        (tangent(stride=(1, 2)), (1, 2)),
        (tangent(stride=("s", 1)), (4, 1)),
    ],
    ids=["format", "strides", "strides of symbols"],
)
def test_gradient_is_laid_out_as_captured(given, spec, stride):
    laid_out = layout(spec)(given, {"s": 4})
    assert (laid_out.dtype, laid_out.stride()) == (torch.float32, stride)
    assert torch.equal(laid_out, given.float())


def test_gradient_where_none_flows_is_zeros_laid_out_so():
    undefined = zeros(tangent(stride=(1, 2)), (2, 3), torch.device("cpu"), {})
    assert undefined.stride() == (1, 2)
    assert torch.equal(undefined, torch.zeros(2, 3))
