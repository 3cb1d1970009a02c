"""Operators with bodies: what no bundle holds, refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotexport
from aotexport import ExportFailed


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_part_that_writes_to_buffers_is_refused(tmp_path, reentrant):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(self.norm, x, use_reentrant=reentrant)

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ExportFailed) as caught:
        aotexport.export(Normalised(), (x,), output=tmp_path / "bundle", verify=False)
    line = f"{__file__}:{Normalised.forward.__code__.co_firstlineno + 1}: in forward: "
    assert str(caught.value) == (
        f"{line}a checkpointed part of the model writes to `norm.num_batches_tracked`, and eager writes again when it "
        "computes the part anew in backward, which a bundle does not. Take it out of the checkpoint"
    )
