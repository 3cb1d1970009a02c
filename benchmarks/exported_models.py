"""Models that are measured where `--models` names them: small, of model libraries or written here."""

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


def _resnet18() -> nn.Module:
    from torch import manual_seed
    from transformers import ResNetConfig, ResNetForImageClassification

    manual_seed(0)
    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=1000)).train()


def _mobilenet() -> nn.Module:
    from torch import manual_seed, nn

    def layer(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(out, 0.001, 0.01)]

    class Squeeze(nn.Module):
        """Squeeze and excitation: a factor per channel, of the means of all."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            narrow = channels // 4
            down, up = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)
            self.factor = nn.Sequential(nn.AdaptiveAvgPool2d(1), down, nn.ReLU(), up, nn.Hardsigmoid())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor(x) * x

    class Block(nn.Module):
        def __init__(self, sizes: tuple[int, int, int, int], squeezed: bool, activation: type, stride: int) -> None:
            super().__init__()
            channels, wide, out, kernel = sizes
            self.residual = stride == 1 and channels == out
            self.layers = nn.Sequential(
                *((*layer(channels, wide, 1), activation()) if wide != channels else ()),
                *(*layer(wide, wide, kernel, stride, wide), activation()),
                *((Squeeze(wide),) if squeezed else ()),
                *layer(wide, out, 1),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layers(x) if self.residual else self.layers(x)

    manual_seed(0)
    relu, swish = nn.ReLU, nn.Hardswish
    return nn.Sequential(
        *(*layer(3, 16, 3, 2), swish()),
        Block((16, 16, 16, 3), True, relu, 2),
        *(Block((16, 72, 24, 3), False, relu, 2), Block((24, 88, 24, 3), False, relu, 1)),
        Block((24, 96, 40, 5), True, swish, 2),
        *(Block((40, 240, 40, 5), True, swish, 1) for _ in range(2)),
        *(Block((40, 120, 48, 5), True, swish, 1), Block((48, 144, 48, 5), True, swish, 1)),
        Block((48, 288, 96, 5), True, swish, 2),
        *(Block((96, 576, 96, 5), True, swish, 1) for _ in range(2)),
        *(*layer(96, 576, 1), swish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(576, 1024), swish(), nn.Dropout(0.2), nn.Linear(1024, 1000)),
    )


def _minilm_of_one() -> nn.Module:
    from benchmarks.models import MODELS

    return MODELS["minilm"].module()


def _sentence() -> Inputs:
    import torch

    ids = tokens(30000, 1, 16)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _decoder() -> nn.Module:
    import torch
    from torch import nn
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    class Decoder(nn.Module):
        """One token of GPT-2 after those whose keys and values are given, as (layers, batch, heads, steps, width)."""

        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096, "n_positions": 512}
            self.network = GPT2LMHeadModel(GPT2Config(**sizes))

        def forward(self, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache = DynamicCache()
            for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
                cache.update(key, value, layer)
            logits = self.network(ids, past_key_values=cache, use_cache=True).logits
            new = [torch.stack([getattr(layer, of)[:, :, -1:] for layer in cache.layers]) for of in ("keys", "values")]
            return logits, *new

    torch.manual_seed(0)
    return Decoder()


def _token_with_cache() -> Inputs:
    import torch

    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, 1, 4, 128, 64, generator=generator) for _ in range(2))
    return {"ids": tokens(4096, 1, 1), "keys": keys, "values": values}


def _cache_sizes() -> Any:
    from torch.export import Dim

    steps = {3: Dim("steps", min=2, max=510)}
    return {"ids": None, "keys": steps, "values": steps}


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
    Model(
        "resnet18", "ResNet-18, one image of 224 x 224", _resnet18, floats(1, 3, 224, 224), mean_square, (), _OUTPUTS
    ),
    Model("mobilenet", "MobileNetV3, small, one image of 224 x 224", _mobilenet, floats(1, 3, 224, 224), mean_square),
    Model("sentence", "all-MiniLM-L6-v2, 1 x 16 tokens", _minilm_of_one, _sentence, mean_square, (), _OUTPUTS),
    Model(
        "decode",
        "a token of GPT-2, 4 layers of 256, after 128 in a cache",
        _decoder,
        _token_with_cache,
        mean_square,
        (),
        "",
        _cache_sizes,
    ),
    Model("gat", "graph attention, 2 layers, 320 edges", _gat, _graph, mean_square, (), "", _graph_sizes),
)
"""Measured where `--models` names them."""
