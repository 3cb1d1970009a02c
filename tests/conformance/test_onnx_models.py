"""Architectures in ONNX Runtime, equal to eager at every size, with little beside the weights."""

import pytest
import torch

import aotexport
from tests.cases.onnx_models import MODELS


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_architecture_in_onnx_runtime_equals_eager(tmp_path, name):
    torch.manual_seed(0)
    model, kwargs, sizes = MODELS[name]()
    report = aotexport.export(
        model, (), kwargs, output=tmp_path / "bundle", programs="infer", dynamic_shapes=sizes, onnx=True
    )
    found = [comparison for comparison in report.comparisons if comparison.target == "onnx"]
    assert len(found) >= 3, "the example, and calls of other sizes"
    assert max(comparison.error for comparison in found) < 1e-5
    assert not (tmp_path / "bundle/targets").exists()
