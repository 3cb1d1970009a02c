"""Small models of every family that the kernels must be right for, with their example calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models import module

Model = tuple[nn.Module | Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A model, its positional arguments, and further arguments of `aotexport.export`."""


def mlp() -> Model:
    """Normalisation, an activation, a loss; the batch may vary."""

    body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    model = module(lambda self, x, y: functional.cross_entropy(self.body(x), y), body=body)
    batch = torch.export.Dim("batch", min=2, max=64)
    return model, (torch.randn(4, 16), torch.arange(4)), {"dynamic_shapes": ({0: batch}, {0: batch})}


def cnn() -> Model:
    """Convolutions and batch normalisation, whose statistics are state."""

    width = 8
    block = module(
        lambda self, x: functional.relu(x + self.norms[1](self.second(functional.relu(self.norms[0](self.first(x)))))),
        first=nn.Conv2d(width, width, 3, padding=1),
        second=nn.Conv2d(width, width, 3, padding=1),
        norms=nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)]),
    )
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), block, *head), (torch.randn(2, 3, 16, 16),), {}


def attention() -> Model:
    """Fused attention, causal."""

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    model = module(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))
    sequence = torch.export.Dim("sequence", min=2, max=32)
    return model, (torch.randn(2, 6, 16),), {"dynamic_shapes": ({1: sequence},)}


def masked_attention() -> Model:
    """Fused attention with a learned bias, shared heads, an odd width, and fewer rows than columns."""

    def forward(self, x, memory):
        query = self.query(x).unflatten(-1, (4, 7)).transpose(1, 2)
        key, value = (part.unflatten(-1, (2, 7)).transpose(1, 2) for part in self.pair(memory).chunk(2, -1))
        return functional.scaled_dot_product_attention(query, key, value, self.bias, enable_gqa=True)

    bias = nn.Parameter(torch.randn(4, 3, 5))
    model = module(forward, query=nn.Linear(8, 28), pair=nn.Linear(8, 28), bias=bias)
    return model, (torch.randn(2, 3, 8), torch.randn(2, 5, 8)), {}


def half_attention() -> Model:
    """Fused attention in half precision."""
    model, (x,), options = attention()
    return model.bfloat16(), (x.bfloat16(),), options


def of_triton() -> Model:
    """Kernels that a user wrote, with gradients by kernels."""
    from tests.cases.triton_kernels import OfTriton

    batch = torch.export.Dim("batch", min=2, max=64)
    return OfTriton(), (torch.randn(5, 4),), {"dynamic_shapes": ({0: batch},)}


def writing_operators() -> Model:
    """Operators of the user's that write: to a buffer, to views and lists, and in a backward."""
    from tests.cases.operators import add_all_, operator_that_writes_in_a_backward, scale_

    def forward(self, x):
        hidden = self.linear(x)
        with torch.no_grad():
            scale_(self.scale, x.mean(0))
            rows, columns = x.sin(), x.cos()
            scale_(rows[0], self.scale)
            total = add_all_([columns.t()[1:], rows[1:, :3].t()], None, 3)
        return operator_that_writes_in_a_backward(hidden, self.scale) + rows, columns, total

    return module(forward, linear=nn.Linear(4, 4), scale=torch.ones(4)), (torch.randn(3, 4),), {}


def subclass() -> Model:
    """Weights of a tensor subclass, which graphs take apart."""
    from tests.scaled import ScaledInt8

    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    second.weight = nn.Parameter(ScaledInt8.of(torch.randn(4, 6)), requires_grad=False)
    model = module(lambda self, x: self.second(self.first(x).relu()).tanh(), first=first, second=second)
    return model, (torch.randn(3, 4),), {}


def bert() -> Model:
    """An encoder of the `transformers` library, with padding."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = module(lambda self, x, mask: self.model(x, attention_mask=mask).pooler_output, model=BertModel(config))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return model, (torch.randint(0, 64, (2, 8)), mask), {}


def scatter() -> Model:
    """Atomic additions, scans, sorts and reductions."""

    def forward(self, x, index):
        rows = self.table[index] * x.sigmoid()
        summed = torch.zeros(6, 8).index_add(0, index % 6, rows)
        running = torch.cumsum(summed, 1)
        return running.logsumexp(1), rows.var(0), rows.norm(), torch.sort(summed, dim=1).values

    model = module(forward, table=nn.Parameter(torch.randn(10, 8)))
    return model, (torch.randn(7, 8), torch.randint(0, 10, (7,))), {}


def bfloat16_extrema() -> Model:
    """Greatest and least values of what 16 bits round, whose gradients go where these are."""

    def forward(self, x):
        y = functional.silu(x * self.scale)
        return y.amax(1), y.amin(1), y.max(0).values, y.max()

    scale, x = nn.Parameter(torch.randn(8, dtype=torch.bfloat16)), torch.randn(6, 8, dtype=torch.bfloat16)
    return module(forward, scale=scale), (x,), {}


def pools() -> Model:
    """Pools whose windows reach past the end, and past the padding."""

    def forward(self, x):
        x = self.conv(x)
        return (
            functional.avg_pool2d(x, 3, 2, ceil_mode=True),
            functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            functional.avg_pool2d(x, 2, divisor_override=3, ceil_mode=True),
            functional.max_pool2d(x, 3, 2, ceil_mode=True),
        )

    return module(forward, conv=nn.Conv2d(2, 3, 3, padding=1)), (torch.randn(2, 2, 8, 9),), {}


QUICK = {"of_triton": of_triton, "masked_attention": masked_attention}
SLOW = {
    each.__name__: each
    for each in (
        *(mlp, attention, bfloat16_extrema, half_attention, pools),
        *(writing_operators, subclass, bert, cnn, scatter),
    )
}
