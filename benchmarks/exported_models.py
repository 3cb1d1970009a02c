"""Models that the suite `export` knows beside those of every suite: small, of model libraries or written here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.model import (
    Inputs,
    Model,
    batch_sizes,
    floats,
    images,
    mean_square,
    own_loss,
    sequence_sizes,
    tokens,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

_OUTPUTS = "transformers.modeling_outputs"
_TEXT_SIZES = sequence_sizes("input_ids", "attention_mask")
_IMAGE_SIZES = batch_sizes("pixel_values", "labels")


def _segformer() -> nn.Module:
    from torch import manual_seed
    from transformers import SegformerConfig, SegformerForImageClassification

    manual_seed(0)
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128], "decoder_hidden_size": 64}
    return SegformerForImageClassification(SegformerConfig(**sizes, num_labels=10)).train()


def _swin() -> nn.Module:
    from torch import manual_seed
    from transformers import SwinConfig, SwinForImageClassification

    manual_seed(0)
    sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return SwinForImageClassification(SwinConfig(**sizes, image_size=64, num_labels=10)).train()


def _convnext() -> nn.Module:
    from torch import manual_seed
    from transformers import ConvNextConfig, ConvNextForImageClassification

    manual_seed(0)
    sizes = {"hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 2, 2]}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, num_labels=10)).train()


def _electra() -> nn.Module:
    from torch import manual_seed
    from transformers import ElectraConfig, ElectraModel

    manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    return ElectraModel(ElectraConfig(**sizes, embedding_size=128, vocab_size=8000)).train()


def _unet() -> nn.Module:
    from torch import cat, manual_seed, nn

    def block(channels: int, out: int) -> nn.Sequential:
        first, second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(out), nn.ReLU(), second, nn.BatchNorm2d(out), nn.ReLU())

    class UNet(nn.Module):
        """Three levels down and up, with skips."""

        def __init__(self) -> None:
            super().__init__()
            widths = [16, 32, 64]
            self.down = nn.ModuleList(block(c, o) for c, o in zip([3, *widths], widths, strict=False))
            self.bottom = block(64, 128)
            self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
            self.up = nn.ModuleList(block(2 * w, w) for w in reversed(widths))
            self.head = nn.Conv2d(16, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skips = []
            for down in self.down:
                skips.append(down(x))
                x = nn.functional.max_pool2d(skips[-1], 2)
            x = self.bottom(x)
            for grow, up, skip in zip(self.grow, self.up, reversed(skips), strict=True):
                x = up(cat([skip, grow(x)], 1))
            return self.head(x)

    manual_seed(0)
    return UNet()


def _gat() -> nn.Module:
    import torch
    from torch import nn

    class Attention(nn.Module):
        """Graph attention over edges, normalised per target node."""

        def __init__(self, width: int, out: int, heads: int) -> None:
            super().__init__()
            self.project = nn.Linear(width, heads * out)
            self.source, self.target = (nn.Parameter(torch.randn(heads, out)) for _ in range(2))
            self.heads = heads

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            h = self.project(x).view(x.shape[0], self.heads, -1)
            source, target = edges[0], edges[1]
            scores = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
            weights = nn.functional.leaky_relu(scores, 0.2).exp()
            total = torch.zeros(x.shape[0], self.heads).index_add(0, target, weights)
            messages = h[source] * (weights / total[target])[..., None]
            return torch.zeros_like(h).index_add(0, target, messages).flatten(1)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention(16, 16, 4), Attention(64, 16, 4)])
            self.head = nn.Linear(64, 7)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = nn.functional.elu(layer(x, edges))
            return self.head(x)

    torch.manual_seed(0)
    return Network()


def _graph() -> Inputs:
    import torch

    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(64, (2, 256), generator=generator)
    loops = torch.arange(64).expand(2, 64)
    return torch.randn(64, 16, generator=generator), torch.cat([edges, loops], 1)


def _text() -> Inputs:
    import torch

    ids = tokens(8000, 4, 64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _graph_sizes() -> Any:
    from torch.export import Dim

    return {"x": {0: Dim("nodes", min=2, max=4096)}, "edges": {1: Dim("edges", min=2, max=65536)}}


EXPORTED = (
    Model("electra", "ELECTRA, 4 layers of 128", _electra, _text, mean_square, (), _OUTPUTS, _TEXT_SIZES),
    Model("segformer", "Segformer, 4 stages, 64 x 64", _segformer, images, own_loss, (), _OUTPUTS, _IMAGE_SIZES),
    Model("swin", "Swin, 2 stages of windows, 64 x 64", _swin, images, own_loss, (), "", _IMAGE_SIZES),
    Model("convnext", "ConvNeXt, 4 stages, 64 x 64", _convnext, images, own_loss, (), _OUTPUTS, _IMAGE_SIZES),
    Model(
        "unet",
        "U-Net of 3 levels, 4 images of 32 x 32",
        _unet,
        floats(4, 3, 32, 32),
        mean_square,
        (),
        "",
        batch_sizes("x"),
    ),
    Model("gat", "graph attention, 2 layers, 320 edges", _gat, _graph, mean_square, (), "", _graph_sizes),
)
"""Measured where `--models` names them."""
