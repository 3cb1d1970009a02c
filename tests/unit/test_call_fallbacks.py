"""Calls that only the forward graph gets right, and what a failing call leaves behind."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aotexport
import aotexport_runtime
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.module.describe import describe
from tests import models


def second_half_of_doubled(x):
    x.mul_(2)
    return x.split(2)[1]


def test_view_without_steps_of_a_written_input_is_of_the_callers_elements(load):
    module = load(second_half_of_doubled, torch.arange(6.0))
    for offset in (0, 3):
        base, expected = torch.arange(12.0), torch.arange(12.0)
        view = module(base[offset : offset + 6])
        second_half_of_doubled(expected[offset : offset + 6]).neg_()
        view.neg_()
        assert torch.equal(base, expected)


class Deep(torch.nn.Module):
    def forward(self, x):
        for _ in range(40):
            x = x.sin()
        return x


@pytest.mark.parametrize(
    ("layer", "shape", "options", "reason"),
    [
        # A joint graph takes a recurrent layer apart, step by step.
        (torch.nn.GRU(3, 3), (12, 2, 3), {}, "the other graph takes its 4 operators apart, into 751"),
        (torch.nn.Linear(3, 3), (2, 3), {}, "no matmul is large enough to gain by oneDNN"),
        (torch.nn.Linear(3, 3), (2, 3), {"target": "portable"}, None),
        (Deep(), (2, 3), {}, None),
    ],
)
def test_graph_that_is_the_faster_one_runs(new_bundle, caplog, layer, shape, options, reason):
    caplog.set_level("INFO", "aotexport_runtime")
    x = torch.randn(*shape, requires_grad=True)
    module = torch.nn.Sequential(layer)
    loaded = aotexport_runtime.load(new_bundle(module, x), **options)
    caplog.clear()
    results = [output if isinstance(output, torch.Tensor) else output[0] for output in (loaded(x), module(x))]
    torch.testing.assert_close(*results)
    assert (results[0].grad_fn.name() == "_JointBackward") == (reason is None)
    if reason is None:
        assert caplog.messages == ["program train runs forward by portable"]
    else:
        chosen, ran = caplog.messages
        assert chosen == f"program train runs its forward graph: {reason}"
        assert ran == "program train runs forward and backward by autograd"
    inspected = describe(loaded.bundle, program="train")
    assert (f"under target auto the forward graph runs: {reason}" in inspected) == (reason is not None)


@pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
def test_large_products_decide_by_the_library_that_computes_them(tmp_path):
    x = torch.randn(128, 160)
    aotexport.export(torch.nn.Linear(160, 192), (x,), output=tmp_path / "bundle", verify=False)
    for products, engine, reason in (
        ("onednn", "portable", "oneDNN is faster here for 128x160 by 160x192"),
        ("torch", "autograd", "oneDNN is not clearly faster here for 128x160 by 160x192"),
    ):
        loaded = aotexport_runtime.load(tmp_path / "bundle", matmul=products)
        found = loaded.explain_program("train")
        assert found.engines[0] == engine
        assert (found.because or found.why_not["portable"]) == reason
        assert reason in str(found)
    inspected = describe(loaded.bundle, program="train")
    assert "under target auto the functional graph runs: oneDNN may be faster for 128x160 by 160x192" in inspected


@pytest.fixture
def counting(load):
    def counted(self, x):
        self.calls.add_(1)
        return self.layer(x)

    model = models.module(counted, layer=torch.nn.Linear(2, 2), calls=torch.zeros(()))
    batch = torch.export.Dim("batch", max=8)
    return load(model, torch.ones(2, 2), dynamic_shapes=({0: batch},), target="auto")


def test_refusal_of_a_size_is_told_once(counting):
    with pytest.raises(aotexport_runtime.CallInvalid, match=r"size 0: `batch` is 9, outside \[") as caught:
        counting(torch.ones(9, 2))
    assert caught.value.__context__ is None
    assert counting.calls == 0


def normed():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def test_checkpoint_that_ends_its_second_run_early_changes_buffers_as_in_eager(tmp_path):
    x = torch.randn(8, 4, requires_grad=True)
    aotexport.export(normed(), (x,), output=tmp_path / "bundle", verify=False)
    found = []
    loaded = [aotexport_runtime.load(tmp_path / "bundle", target=target) for target in ("portable", "autograd")]
    for module in (normed(), *loaded):
        checkpoint(module.train(), x, use_reentrant=False).sum().backward()
        found.append([buffer.clone() for buffer in module.buffers()])
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
    assert found[0][-1] == 2
