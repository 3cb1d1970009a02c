"""Architectures in ONNX Runtime, equal to eager at every size, with little beside the weights."""

import pytest
import torch

import aotexport
import aotexport_runtime
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
    assert len(found) >= 7
    assert max(comparison.error for comparison in found) < 1e-5
    assert not (tmp_path / "bundle/targets").exists()


def train(module, args, kwargs):
    """Take two steps that change every weight and running statistic."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        returned = module.train()(*args, **kwargs)
        outputs = returned if isinstance(returned, torch.Tensor) else returned[0]
        outputs.square().mean().backward()
        optimizer.step()


def predictions(module, args, kwargs):
    with torch.no_grad():
        returned = module(*args, **kwargs)
    return returned if isinstance(returned, torch.Tensor) else returned[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "resnet", "digits_cnn"])
@pytest.mark.filterwarnings("ignore")
def test_tuned_bundle_gives_the_tuned_predictions_through_onnx(tmp_path, name):
    torch.manual_seed(0)
    if name == "digits_cnn":
        from examples.digits_cnn import model as example

        model, args, kwargs, sizes = example.model(), example.example_inputs(), {}, example.dynamic_shapes
    else:
        model, kwargs, sizes = MODELS[name]()
        args = ()
    aotexport.export(model, args, kwargs, output=tmp_path / "bundle", dynamic_shapes=sizes, onnx=True)
    module = aotexport_runtime.load(tmp_path / "bundle")
    train(module, args, kwargs)
    aotexport_runtime.save(module, tmp_path / "tuned")
    assert (tmp_path / "tuned/model.onnx").read_bytes() == (tmp_path / "bundle/model.onnx").read_bytes()
    before, tuned = (aotexport_runtime.load(tmp_path / bundle, target="onnx") for bundle in ("bundle", "tuned"))
    expected = predictions(module.eval(), args, kwargs)
    torch.testing.assert_close(predictions(tuned, args, kwargs), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(predictions(before, args, kwargs), expected, rtol=1e-3, atol=1e-3)
