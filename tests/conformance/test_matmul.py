"""`load(..., matmul="onednn")`: matmuls by another library, and nothing else differs."""

import pytest
import torch
from torch import nn

import aotexport_runtime
from aotexport_runtime.execution.matmul import onednn


class Matmuls(nn.Module):
    """Matmuls of every kind that engines meet: with and without bias, transposed, of parts, repeated, batched."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(24, 32)
        self.bare = nn.Linear(32, 24, bias=False)
        self.shift = nn.Parameter(torch.randn(1))
        self.tall = nn.Parameter(torch.randn(16, 24))

    def forward(self, x, y):
        hidden = self.bare(self.wide(x).relu())
        repeated = torch.addmm(self.shift.expand(16), hidden, self.tall.t())
        parts = hidden[:, ::2] @ y[4:16] + hidden @ y.new_ones(24, 1).expand(24, 16)
        batched = torch.baddbmm(parts.expand(2, *parts.shape), x.expand(2, *x.shape), y.expand(2, 24, 16))
        return repeated, (repeated.t() @ x).t(), batched, hidden.mv(hidden[0]), x[:0] @ y, x[:, :0] @ y[:0]


@pytest.fixture(scope="module", params=["known", "dynamic"])
def bundle(request, new_bundle):
    torch.manual_seed(0)
    model = Matmuls()
    example = [torch.randn(*shape, requires_grad=True) for shape in ((8, 24), (24, 16))]
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)}, None) if request.param == "dynamic" else None
    return new_bundle(model, *example, dynamic_shapes=shapes, programs=("train",)), model


def step(module, x, y):
    outputs = module(x, y)
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, x.grad, y.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
def test_step_by_onednn_is_eagers(bundle):
    path, model = bundle
    module = aotexport_runtime.load(path, target="portable", matmul="onednn").train()
    given = [torch.randn(8, 24), torch.randn(24, 16)]
    # The first call chooses, the second runs what was chosen.
    for _ in range(2):
        module.zero_grad()
        with torch.profiler.profile() as trace:
            got = step(module, *[tensor.detach().requires_grad_() for tensor in given])
    expected = step(model, *[tensor.detach().requires_grad_() for tensor in given])
    assert any(event.key == "mkldnn::_linear_pointwise" for event in trace.key_averages())
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
