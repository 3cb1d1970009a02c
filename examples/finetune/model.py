"""A small transformer that reads images of digits row by row, as `aotexport` takes it."""

import torch
from torch import nn
from torch.export import Dim

SIZE, HEADS = 32, 4


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.query, self.key, self.value, self.output = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return states of the shape of `x`: `[batch, rows, SIZE]`."""
        normed = self.before(x)
        heads = [
            layer(normed).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.after(x))


class Reader(nn.Module):
    """Two blocks over the eight rows of an image, and a classifier of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, SIZE)
        self.places = nn.Parameter(torch.randn(8, SIZE) / 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(SIZE, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits `[batch, 10]` of images `[batch, 8, 8]` in [0, 1]."""
        return self.classifier(self.dropout(self.blocks(self.rows(images) + self.places).mean(dim=1)))


def model() -> Reader:
    """Return the untrained network; every call gives the same weights."""
    torch.manual_seed(0)
    return Reader()


def example_inputs() -> tuple[torch.Tensor]:
    """Return the inputs of the example call."""
    return (torch.rand(8, 8, 8, generator=torch.Generator().manual_seed(0)),)


dynamic_shapes = {"images": {0: Dim("batch", min=1, max=2048)}}
