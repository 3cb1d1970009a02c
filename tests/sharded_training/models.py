"""A model with blocks of its own class, and tied weights; its units, as a user gives them to `fully_shard`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import aotexport

TOKENS, WIDTH, ROWS, LENGTH = 12, 16, 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + torch.cumsum(self.mix(self.norm(x)), 1)
        return x + self.feed(x)


class Network(nn.Module):
    """Predicts the next token; the head has the weight of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, tokens):
        logits = self.head(self.norm(self.blocks(self.table(tokens))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make() -> Network:
    torch.manual_seed(0)
    return Network()


def export(path: Path) -> None:
    """Export the model for train and eval mode."""
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % TOKENS
    rows = {"tokens": {0: torch.export.Dim("rows", min=1, max=64)}}
    aotexport.export(make(), (tokens,), output=path, programs=("train", "infer"), dynamic_shapes=rows, verify=False)


def batch(rank: int, step: int) -> torch.Tensor:
    """Return what a rank takes in a step: `[ROWS, LENGTH]`."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(TOKENS, (ROWS, LENGTH), generator=draw, dtype=torch.int64)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield layers, but those that share a weight, and the whole."""
    yield from (layer for layer in module.modules() if isinstance(layer, nn.Linear) and layer is not module.head)
    yield module


UNITS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "whole": lambda module: [module],
    "blocks": lambda module: [*module.blocks, module],
    "list_of_blocks": lambda module: [module.blocks, module],
    "layers": lambda module: [*_layers(module)],
    "nested": lambda module: [*(block.feed for block in module.blocks), *module.blocks, module.norm, module],
}
"""Modules to shard, innermost first, by name."""
