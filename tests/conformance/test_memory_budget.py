"""`load(..., memory_budget=...)`: less is saved, and nothing else differs."""

import pytest
import torch
from torch import nn

import aotexport_runtime

BUDGETS = (0.75, 0.5, 0.0)


class Block(nn.Module):
    """Matmuls, element-wise operators, normalisations with and without state, and a draw."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(8, 32)
        self.narrow = nn.Linear(32, 8)
        self.last = nn.LayerNorm(8)

    def forward(self, x):
        hidden = nn.functional.gelu(self.wide(self.norm(x))).tanh()
        return self.last(x + nn.functional.dropout(self.narrow(hidden), 0.5, self.training)).sigmoid()


@pytest.fixture(scope="module")
def bundle(new_bundle):
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=64)
    model = nn.Sequential(Block(), Block())
    return new_bundle(model, torch.randn(4, 8), dynamic_shapes=({0: rows},))


def step(module, x):
    """Run a training step; return everything that can be seen of it, and the bytes that it saves beside the state."""
    state = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = 0 if storage.data_ptr() in state else storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [output, *gradients, *module.buffers(), torch.rand(1)], sum(saved.values())


@pytest.mark.parametrize("budget", BUDGETS)
def test_step_within_a_budget_saves_less_and_gives_the_same(bundle, budget):
    x = torch.randn(16, 8)
    expected, whole = step(aotexport_runtime.load(bundle, target="portable"), x)
    got, saved = step(aotexport_runtime.load(bundle, memory_budget=budget), x)
    # Masks of dropout, and what batch norm reads of the state it changes, cannot be computed again.
    assert saved <= max(budget, 0.4) * whole + x.nbytes
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_input_that_is_computed_from_again_must_not_have_changed(bundle):
    module = aotexport_runtime.load(bundle, memory_budget=0.0)
    x = torch.randn(4, 8)
    output = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("budget", [-0.1, 1.5])
def test_budget_that_is_no_part_is_refused(bundle, budget):
    with pytest.raises(aotexport_runtime.NotSupported) as caught:
        aotexport_runtime.load(bundle, memory_budget=budget)
    assert str(caught.value) == (f"no memory budget {budget}; it is a part of what is saved otherwise, from 0 to 1")
