"""Operators in the forms that torch's exporter and ONNX Runtime take, equal to eager at every size."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import aotexport


def _windows(x):
    repeated = x.unsqueeze(1).expand(-1, 2, -1).as_strided((x.shape[0], 2, 3), (4, 1, 1))
    return repeated.sin(), (x * 2).t().as_strided((3, x.shape[0], 2), (1, 4, 1)).cos()


def _rolled(x):
    return x.roll(x.shape[0] - 3, 1), x.roll((1, x.shape[0]), (1, 0)), x.roll(2)


def _extremes(x):
    return x.amax(), x.amin(), x.amax(1), x[0, 0].amin()


@pytest.mark.parametrize("function", [_windows, _rolled, _extremes])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_operator_in_onnx_runtime_equals_eager_at_every_size(tmp_path, function):
    torch.manual_seed(0)
    sizes = ({0: Dim("rows", min=2, max=64)},)
    bundle = tmp_path / "bundle"
    aotexport.export(
        function, (torch.randn(4, 4),), output=bundle, programs="infer", dynamic_shapes=sizes, verify=False
    )
    _, found = aotexport.export_onnx(bundle)
    assert {comparison.vector for comparison in found} >= {"example", "rows=2", "rows=33"}
    assert all(comparison.agrees for comparison in found)
