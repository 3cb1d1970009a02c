"""Operators with bodies: what no bundle holds, refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.fx.traceback
from torch import nn
from torch.autograd import forward_ad
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


def linearized(x):
    y, tangents_of = torch.func.linearize(torch.sin, x)
    return tangents_of(y)


def test_linear_function_of_what_requires_grad_is_refused(tmp_path):
    with pytest.raises(ExportFailed) as caught:
        aotexport.export(linearized, (torch.ones(3, requires_grad=True),), output=tmp_path / "bundle", verify=False)
    assert str(caught.value) == (
        f"{__file__}:{linearized.__code__.co_firstlineno + 2}: in linearized: the model calls `torch.func.linearize` "
        "on tensors that require grad; what its function returns would require grad, and lead to no gradients. Use "
        "`torch.func.jvp`, or detach the tensors"
    )


def test_failed_capture_leaves_no_level_of_forward_mode_open(tmp_path):
    def leaves_torch(x):
        return x.sum() * float(x.detach().numpy().max())

    with pytest.raises((ExportFailed, RuntimeError)):
        aotexport.export(torch.func.hessian(leaves_torch), (torch.ones(3),), output=tmp_path / "bundle", verify=False)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(forward_ad.make_dual(torch.ones(3), torch.zeros(3))).tangent is not None


def drawing_branch(x):
    return torch.cond(x.sum() > 0, torch.nn.functional.dropout, torch.sin, (x,))


def test_branch_that_draws_on_the_way_to_gradients_is_refused(tmp_path):
    x = torch.ones(3, 4)
    aotexport.export(drawing_branch, (x,), output=tmp_path / "without-gradients")
    with pytest.raises(ExportFailed) as caught:
        aotexport.export(drawing_branch, (x.requires_grad_(),), output=tmp_path / "bundle", verify=False)
    assert str(caught.value) == (
        f"test_bodies.py:{drawing_branch.__code__.co_firstlineno + 1}: in drawing_branch: `cond` draws "
        "random numbers (`aten.dropout.default`) on the way to gradients, and its backward in torch draws others, so "
        "that the gradients belong to another result. Draw before it, and pass the numbers in"
    )


def test_annotations_of_the_model_do_not_outlive_the_export(tmp_path):
    def annotated(x):
        with torch.fx.traceback.annotate({"fallback_to_eager": True}):
            return x * 2

    with torch.fx.traceback.annotate({"outer": True}):
        aotexport.export(annotated, (torch.randn(3, requires_grad=True),), output=tmp_path / "bundle", verify=False)
        assert torch.fx.traceback.get_current_meta()["custom"] == {"outer": True}
    assert "custom" not in torch.fx.traceback.get_current_meta()


def test_export_of_views_that_require_grad_leaves_no_annotations(tmp_path):
    x = torch.ones(4, 3, requires_grad=True).clone()[:2]
    aotexport.export(lambda x: x * 2, (x,), output=tmp_path / "bundle", verify=False)
    assert torch.fx.traceback.get_current_meta() == {}
