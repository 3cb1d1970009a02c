"""Models of libraries that the environment of the project lacks, for the suite `export`: small, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.model import Inputs, Model, batch_sizes, floats, mean_square, sequence_sizes, tokens

if TYPE_CHECKING:
    import torch
    from torch import nn


def _smp_unet() -> nn.Module:
    from segmentation_models_pytorch import Unet
    from torch import manual_seed

    manual_seed(0)
    return Unet("resnet18", encoder_weights=None, decoder_channels=(64, 48, 32, 24, 16), classes=3).train()


def _open_clip() -> nn.Module:
    from open_clip import CLIP, CLIPTextCfg, CLIPVisionCfg
    from torch import manual_seed

    manual_seed(0)
    vision = CLIPVisionCfg(layers=4, width=192, head_width=64, patch_size=8, image_size=64)
    return CLIP(128, vision, CLIPTextCfg(layers=4, width=128, heads=4, context_length=32, vocab_size=4096)).train()


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel
    from torch import manual_seed

    manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 48, "num_layers": 4, "sample_size": 16}
    return DiTTransformer2DModel(**sizes, out_channels=8, num_embeds_ada_norm=10).train()


def _autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL
    from torch import manual_seed

    manual_seed(0)
    blocks: dict[str, Any] = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    ways: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return AutoencoderKL(**blocks, **ways).train()


def _x_transformer() -> nn.Module:
    from torch import manual_seed
    from x_transformers import Decoder, TransformerWrapper

    manual_seed(0)
    layers = Decoder(dim=256, depth=4, heads=4, rotary_pos_emb=True, attn_flash=True)
    return TransformerWrapper(num_tokens=4096, max_seq_len=256, attn_layers=layers).train()


def _captions() -> Inputs:
    return {"image": floats(4, 3, 64, 64)()[0], "text": tokens(4096, 4, 32)}


def _steps() -> Inputs:
    """Return noisy latents, each with a step of time and a class."""
    import torch

    states = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"hidden_states": states, "timestep": torch.tensor([1, 250, 500, 999]), "class_labels": torch.arange(4)}


def _text() -> Inputs:
    return (tokens(4096, 2, 64),)


def _contrast(output: Any) -> torch.Tensor:
    """Return the loss of pairs of images and texts, each among the others of the batch."""
    import torch

    images, texts, scale = output
    logits, pairs = scale * images @ texts.T, torch.arange(len(images))
    entropy = torch.nn.functional.cross_entropy
    return (entropy(logits, pairs) + entropy(logits.T, pairs)) / 2


LIBRARY = (
    Model(
        "smp-unet",
        "U-Net of segmentation_models_pytorch on ResNet-18, 2 images of 64 x 64",
        _smp_unet,
        floats(2, 3, 64, 64),
        mean_square,
        (),
        "",
        batch_sizes("x"),
    ),
    Model(
        "open-clip",
        "CLIP of open_clip, 4 and 4 layers, 4 images of 64 x 64",
        _open_clip,
        _captions,
        _contrast,
        (),
        "",
        batch_sizes("image", "text"),
    ),
    Model(
        "dit",
        "DiT of diffusers, 4 layers of 192, 4 latents of 16 x 16",
        _dit,
        _steps,
        mean_square,
        (),
        "diffusers.models.modeling_outputs",
        batch_sizes("hidden_states", "timestep", "class_labels"),
    ),
    Model(
        "autoencoder",
        "AutoencoderKL of diffusers, 2 blocks each way, 4 images of 32 x 32",
        _autoencoder,
        floats(4, 3, 32, 32),
        mean_square,
        (),
        "diffusers.models.autoencoders.vae",
        batch_sizes("sample", most=32),  # from 64 on diffusers runs other code
    ),
    Model(
        "x-transformer",
        "decoder of x-transformers, 4 layers of 256, 2 x 64 tokens",
        _x_transformer,
        _text,
        mean_square,
        (),
        "",
        sequence_sizes("x", most=256),
    ),
)
"""Measured where `--models` names them, and where their library is installed."""
