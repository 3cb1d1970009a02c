"""Attributes that the first call sets for good: served where the call does the same without, else refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.errors import ExportFailed


class Prepared(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.part = nn.Module()
        self.part.prepared_for = "nothing"
        self.scale = scale

    def forward(self, x):
        mode = "training" if self.training else "inference"
        if self.part.prepared_for != mode:
            with torch.no_grad():
                self.weight.mul_(self.scale)
            self.part.prepared_for = mode
        return x * self.weight


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


def test_attribute_that_changes_nothing_else_is_settled(tmp_path):
    model, x = Prepared(), torch.randn(2, 3)
    report = aotexport.export(model, (x,), output=tmp_path / "bundle")
    assert model.part.prepared_for == "nothing"
    assert report.notes == [
        f"the first call sets the attribute `part.prepared_for` of the model to '{mode}', which changes nothing else: "
        "the bundle does what later calls do"
        for mode in ("training", "inference")
    ]
    loaded = aotexport_runtime.load(tmp_path / "bundle")
    version = loaded.weight._version
    torch.testing.assert_close(loaded(x), x * model.weight)
    assert loaded.weight._version == version


@pytest.mark.parametrize("model", [Prepared(scale=2.0), Counted()], ids=["first call differs", "every call differs"])
def test_attribute_that_tells_calls_apart_is_refused(tmp_path, model):
    with pytest.raises(ExportFailed, match="the call changes the attribute"):
        aotexport.export(model, (torch.randn(2, 3),), output=tmp_path / "bundle", verify=False)
