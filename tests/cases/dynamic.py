"""Dynamic sizes: named, equal, derived, data-dependent."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from tests.cases import case
from tests.cases.mutations import leaf

BATCH = Dim("batch", min=1, max=64)
LENGTH = Dim("length", min=2, max=32)
HALF = Dim("half", min=1, max=16)


@case(lambda: (leaf(4, 3),), dynamic_shapes=({0: BATCH},))
def dynamic_rows(x):
    return x.mean(0), x * x.shape[0], x.view(-1)


@case(lambda: (leaf(4, 3), torch.randn(4)), dynamic_shapes=({0: BATCH}, {0: BATCH}))
def equal_dimensions(x, y):
    return x * y[:, None], y.repeat(2)


@case(lambda: (leaf(4, 3), leaf(8)), dynamic_shapes=({0: HALF}, {0: 2 * HALF}))
def derived_dimension(x, y):
    return x.sum(1) + y.view(-1, 2).sum(1)


@case(lambda: (leaf(2, 5, 4),), dynamic_shapes=({0: BATCH, 1: LENGTH},))
def two_dimensions(x):
    scores = x @ x.transpose(1, 2)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ x


@case(lambda: (leaf(4, 6),), dynamic_shapes=({0: BATCH},))
def views_with_dynamic_sizes(x):
    y = x * 2
    return x.view(-1, 3), y.view(-1), y[1:], x.t()


@case(lambda: (leaf(4, 3),), dynamic_shapes=({0: BATCH},))
def size_among_outputs(x):
    return x.sum(), x.shape[0], x.shape


@case(lambda: (torch.randn(4, 3),), dynamic_shapes=({0: BATCH},))
class DynamicModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.rows.add_(x.shape[0])
        return nn.functional.relu(self.linear(self.norm(x)))


@case(lambda: (leaf(4, 3), torch.randn(2, 3)), dynamic_shapes=({0: BATCH}, {0: LENGTH}))
def concatenated_sizes(x, y):
    return torch.cat([x, y]).cumsum(0), torch.zeros(x.shape[0] + y.shape[0])


@case(lambda: (torch.tensor([0.0, 1, 2, 0]),))
def data_dependent_size(x):
    return x.nonzero() * 2, x[x > 0].sum()


@case(lambda: (torch.tensor(3), leaf(4)))
def checked_number(n, x):
    k = n.item()
    torch._check(k >= 1)
    torch._check(k <= 4)
    return x * torch.ones(k).sum()
