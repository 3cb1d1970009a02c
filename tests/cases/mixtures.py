"""Hazards that meet: mutation, aliases, hooks, custom functions, regions without gradients, sizes, random numbers."""

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.cases import case, slow_case
from tests.cases.mutations import leaf

ROWS = Dim("rows", min=2, max=8)


@slow_case(lambda: (leaf(2, 5, 4),), dynamic_shapes=({1: ROWS},))
class AttentionWithCacheOfDynamicLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())
        self.register_buffer("cache", torch.zeros(2, 8, 4), persistent=False)

    def forward(self, x):
        length = x.shape[1]
        keys = x @ self.weight
        self.cache[:, :length] = keys.detach()
        scores = (x @ keys.transpose(1, 2)).masked_fill(~self.mask[:length, :length], float("-inf"))
        return functional.dropout(scores.softmax(-1), 0.2, self.training) @ x, self.cache[:, :length]


@case(lambda: (leaf(4, 3),), dynamic_shapes=({0: ROWS},), forward_only="registers hooks")
def view_written_after_its_base_has_a_hook(x):
    doubled = x * 2
    doubled.register_hook(lambda grad: grad * 5)
    doubled[x.shape[0] // 2].mul_(3)
    return doubled.sum(0)


@slow_case(lambda: (leaf(3, 4),), forward_only="the model recomputes checkpointed parts")
class CountedCheckpointWithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        hidden = checkpoint(lambda part: functional.dropout(self.linear(part), 0.4), x, use_reentrant=False)
        return hidden * self.calls, torch.rand(2)


@slow_case(lambda: (leaf(1, 4),))
class RingOfStates(nn.Module):
    """A cache at a position that the data tell, and one that the call replaces."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("states", torch.zeros(6, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(1, 4))

    def forward(self, x):
        self.states.index_copy_(0, self.position.view(1), (x @ self.weight).detach())
        self.position.add_(1)
        self.last = x.detach() + self.last.roll(1, 1)
        return self.states @ self.weight, self.states[:2], self.last * x
