"""Hooks that the model registers on tensors. They change gradients, so that a lost one shows."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cases import case, slow_case
from tests.cases.mutations import leaf

HOOKS = "registers hooks"


@slow_case(lambda: (leaf(3, 4), leaf(4)), forward_only=HOOKS)
def hook_that_clips(x, w):
    hidden = x * 2
    hidden.register_hook(lambda grad: (grad * 3 + w).clamp(-2, 2))
    hidden.register_hook(lambda grad: torch.where(grad > 1, grad, grad * 5))
    return hidden.sin() * w, hidden, x * 3


@case(lambda: (torch.randn(3, 4),), forward_only=HOOKS)
class HookThatWritesToABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(()))

    def keep(self, grad):
        self.largest.copy_(torch.maximum(self.largest, grad.abs().max()))

    def forward(self, x):
        hidden = self.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(self.keep)
        return hidden.relu()


@slow_case(lambda: (leaf(3, 4),), forward_only=HOOKS)
def hook_seen_by_a_gradient_inside(x):
    hidden = x * 2
    hidden.register_hook(lambda grad: grad * 3)
    (slope,) = torch.autograd.grad(hidden.sin().sum(), x, create_graph=True)
    return slope.cos() + hidden


@case(lambda: (leaf(3, 4),))
def hook_that_only_looks(x):
    hidden = x * 2
    hidden.register_hook(lambda grad: None)
    return hidden.sin()


@slow_case(lambda: (leaf(3, 4),), forward_only=HOOKS)
def hook_in_a_checkpoint(x):
    def inner(x):
        hidden = x * 2
        hidden.register_hook(lambda grad: grad * 5)
        return hidden.sin()

    return checkpoint(inner, x, use_reentrant=False)
