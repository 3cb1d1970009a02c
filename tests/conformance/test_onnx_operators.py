"""Operators in the forms that torch's exporter and ONNX Runtime take, equal to eager at every size."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import aotexport
from aotexport import OnnxOptions


def _windows(x):
    repeated = x.unsqueeze(1).expand(-1, 2, -1).as_strided((x.shape[0], 2, 3), (4, 1, 1))
    return repeated.sin(), (x * 2).t().as_strided((3, x.shape[0], 2), (1, 4, 1)).cos()


def _means(x):
    rows = torch.arange(4).expand(x.shape[0], -1) % 2
    return tuple(x.sin().scatter_reduce(1, rows, x, "mean", include_self=own) for own in (True, False))


def _normalised(x):
    norm = nn.functional.batch_norm
    return norm(x, None, None, torch.arange(4.0), x[0], training=True, eps=0.1), norm(x, None, None, training=True)


def _attended(x):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    attend, keys = nn.functional.scaled_dot_product_attention, torch.stack([x[0], x[1].sin(), x[1]])
    added = torch.zeros(2, 3).masked_fill(~mask, -torch.inf)
    few, many = x[None, None, :2], x[:2].expand(1, 4, 2, 4)
    causal = attend(few, keys[None, None], keys[None, None], is_causal=True, scale=0.3)
    grouped = attend(many, keys.expand(1, 2, 3, 4), keys.expand(1, 2, 3, 4), mask, enable_gqa=True)
    return attend(x[:2], keys, keys, mask), attend(x[None, :2], keys[None], keys[None], added), causal, grouped


FUNCTIONS = (
    _windows,
    _means,
    lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), 1),
    lambda x: (x.roll(2), torch.polar(x[:0], x[:0]), torch.einsum("bij,bkj->bik", x[:, None], x[:, None])),
    lambda x: nn.functional.unfold(x[:, None, None], (1, 2), 2, (1, 0)),  # `Einsum`, `node_im2col` fail at size 0.
    lambda x: (x.amax(), x.amin(), x.amax(1), x[0, 0].amin()),
    _normalised,
    lambda x: (x.softmax(1, dtype=torch.float64), nn.functional.log_softmax(x, 0, dtype=torch.float64)),
    _attended,
    lambda x: (x - x[0]) / ((x - x[0]).abs() + 1e-8),  # 0 / 0 where patterns take the number for none.
    lambda x: x[: x.shape[0] // 4] * x[:1],  # Of 5 rows, with which torch traces, it is one.
)


def exported(model, x, bundle, options=None):
    """Return the manifest and the comparisons of a bundle with an ONNX model, for any number of rows."""
    torch.manual_seed(0)
    sizes = ({0: Dim("rows", min=2, max=64)},)
    aotexport.export(model, (x,), output=bundle, programs="infer", dynamic_shapes=sizes, verify=False)
    manifest, found = aotexport.export_onnx(bundle, options)
    assert {comparison.vector for comparison in found} >= {"example", "least-sizes", "other-sizes"}
    assert all(comparison.agrees for comparison in found)
    return manifest, found


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_operators_in_onnx_runtime_equal_eager_at_every_size(tmp_path):
    _, found = exported(lambda x: [function(x) for function in FUNCTIONS], torch.randn(4, 4), tmp_path / "bundle")
    assert [n for n in range(len(FUNCTIONS)) if not any(f"output[{n}]" in each.name for each in found)] == []
    assert [name for name in (b"Einsum", b"node_im2col") if name in (tmp_path / "bundle/model.onnx").read_bytes()] == []


FEW = torch.tensor([0, 1, 3, 2])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: nn.functional.cross_entropy(x, FEW, label_smoothing=0.1), "with `label_smoothing`, or targets that"),
        (lambda x: nn.functional.cross_entropy(x, x.softmax(1)), "with `label_smoothing`, or targets that are prob"),
        (lambda x: nn.functional.avg_pool2d(x[None], 2, divisor_override=3), "with `divisor_override`. Multiply"),
        (lambda x: FEW.scatter_reduce(0, FEW, FEW, "mean") + x, "the mean of integers is rounded. Convert them"),
    ],
)
def test_operator_that_would_compute_something_else_is_refused_without_a_comparison(tmp_path, function, reason):
    aotexport.export(function, (torch.randn(4, 4),), output=tmp_path / "bundle", programs="infer", verify=False)
    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export_onnx(tmp_path / "bundle", verify=False)
    assert f") has no translation to ONNX: {reason}" in str(caught.value)


class Normalised(nn.Module):
    """A normalisation that keeps statistics, always as in training."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)

    def forward(self, x):
        self.norm.train()
        return self.norm(x)


def test_running_statistics_in_onnx_runtime_equal_those_of_eager(tmp_path):
    manifest, _ = exported(Normalised(), torch.randn(4, 3, 2, 2), tmp_path / "bundle", OnnxOptions(state="outputs"))
    assert {"norm.running_mean", "norm.running_var"} <= set(manifest.onnx[0].updates)
