"""Recorded calls whose large arguments are made by a generator, and without the user's own where these are large."""

import numpy
import pytest
import torch
from torch import nn

import aotexport
from aotexport.vectors import thin
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.self_test import selftest
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.serving.onnx_program import read_call

BATCH = torch.export.Dim("batch")


class Weighted(nn.Module):
    """Sums an image by a mask that is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (image * self.scale * mask).flatten(1).sum(1)


def exported(path, size, **options):
    torch.manual_seed(0)
    image, mask = torch.randn(2, 3, size, size), torch.randint(0, 2, (2, 3, size, size)).float()
    shapes = ({0: BATCH}, {0: BATCH})
    report = aotexport.export(Weighted(), (image, mask), output=path, dynamic_shapes=shapes, **options)
    return report, open_bundle(path)


def recorded(bundle, name):
    entry = next(entry for entry in bundle.manifest.testvectors if (entry.program, entry.name) == ("infer", name))
    return entry, *read_vector(bundle, entry)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thin, "_MOST_NBYTES", 1 << 30)
        return exported(tmp_path_factory.mktemp("generated") / "bundle", 64, verify=False)[1]


def test_large_floats_are_made_and_masks_and_the_example_are_stored(small):
    _, vector, stored = recorded(small, "batch-is-1")
    assert [bool(spec.quantiles) for spec in vector.inputs] == [True, False]
    assert [tuple(spec.shape) for spec in vector.inputs] == [(1, 3, 64, 64)] * 2
    assert set(stored["input1"].tolist()) == {0.0, 1.0}
    made = stored["input0"]
    assert (abs(made.mean().item()) < 0.05, 0.9 < made.std().item() < 1.2, len(made.unique()) > 10_000) == (True,) * 3
    assert not any(spec.quantiles for spec in recorded(small, "example")[1].inputs)


def test_arrays_and_tensors_are_made_alike(small):
    entry, _, stored = recorded(small, "other-sizes")
    array = read_call(small, entry)[1][0]
    assert numpy.array_equal(array.reshape(-1), stored["input0"].numpy())


def test_large_example_is_compared_and_left_out(tmp_path):
    report, bundle = exported(tmp_path / "bundle", 128, verify="fast", programs="infer")
    assert "example" in {comparison.vector for comparison in report.comparisons}
    assert [entry.name for entry in bundle.manifest.testvectors] == ["other-sizes", "batch-is-0", "batch-is-1"]
    assert selftest(tmp_path / "bundle")


def test_example_whose_arguments_share_memory_is_kept(tmp_path):
    x = torch.randn(300_000)
    aotexport.export(lambda a, b: a + b, (x[1:], x[:-1]), output=tmp_path / "bundle", verify=False)
    assert {"example", "random"} <= {entry.name for entry in open_bundle(tmp_path / "bundle").manifest.testvectors}


NORMAL = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
SHOWN = {
    "nothing": (torch.tanh, NORMAL),
    "a row of zeros": (
        lambda x: torch.where(x.abs().sum(1) > 0, x.sum(1), 1.0),
        torch.cat([NORMAL[:63], torch.zeros(1, 128)]),
    ),
    "an order": (lambda x: (x[:, :-1] - x[:, 1:]).exp(), NORMAL.abs().cumsum(1)),
}
"""Programs and arguments, by what the arguments show and made ones do not."""


@pytest.mark.parametrize("shown", SHOWN)
def test_example_that_shows_more_than_made_arguments_is_kept(new_bundle, monkeypatch, shown):
    monkeypatch.setattr(thin, "_MOST_NBYTES", 0)
    function, x = SHOWN[shown]
    kept = {entry.name for entry in open_bundle(new_bundle(function, x)).manifest.testvectors}
    assert kept == ({"random"} if shown == "nothing" else {"random", "example"})
