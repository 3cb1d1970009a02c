"""Models for GPUs: small ones for the tests, larger ones of the same code for the benchmark. They need torch alone."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Model = tuple[nn.Module, tuple[torch.Tensor, ...]]
"""A model that returns a loss, and arguments of a call."""


class Perceptron(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU())
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x, y):
        return functional.cross_entropy(self.head(self.body(x)), y)


class Convolutions(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, stride=2), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, 10)

    def forward(self, x, y):
        hidden = functional.relu(self.first(x))
        hidden = functional.relu(hidden + self.norm(self.second(hidden)))
        return functional.cross_entropy(self.head(hidden.mean((2, 3))), y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, length: int, words: int):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) / 10)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, tokens, targets):
        found = self.head(self.blocks(self.embed(tokens) + self.places))
        return functional.cross_entropy(found.flatten(0, 1), targets.flatten())


def perceptron(batch: int = 8, width: int = 32) -> Model:
    return Perceptron(width), (torch.randn(batch, width), torch.randint(0, 10, (batch,)))


def convolutions(batch: int = 4, width: int = 8, size: int = 16) -> Model:
    return Convolutions(width), (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))


def transformer(
    batch: int = 2, length: int = 16, width: int = 32, heads: int = 2, layers: int = 2, words: int = 50
) -> Model:
    tokens = torch.randint(0, words, (2, batch, length))
    return Transformer(width, heads, layers, length, words), (tokens[0], tokens[1])


def in_bfloat16(made: Model) -> Model:
    model, args = made
    return model.bfloat16(), args


SMALL: dict[str, Callable[[], Model]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "transformer": transformer,
}

LARGE: dict[str, Callable[[], Model]] = {
    "perceptron-large": lambda: perceptron(8192, 4096),
    "transformer-large": lambda: transformer(8, 512, 768, 12, 4, 8192),
    "transformer-bfloat16": lambda: in_bfloat16(transformer(8, 512, 768, 12, 4, 8192)),
    "transformer-one": lambda: transformer(1, 64, 256, 4, 8, 1024),
}


def make(name: str) -> Model:
    """Return a model by name, always with the same weights and arguments."""
    torch.manual_seed(0)
    return {**SMALL, **LARGE}[name]()
