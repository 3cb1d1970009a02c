"""Models of diffusers, made small."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.sweeps.made import Call, Model, images, made, rows

TEXT = (3, 4, 16)


def _diffusers(name: str, call: Callable[[], Call], /, **options: Any) -> Model:
    return made(f"diffusers.{name}", **options), call


def _steps(fixed: dict[str, Any] | None = None, /, **sizes: tuple[int, ...]) -> Callable[[], Call]:
    """Return a call with random values of these sizes at three steps of time, and with fixed arguments."""

    def call() -> Call:
        values = {name: torch.randn(size) for name, size in sizes.items()}
        return rows(**values, **{"timestep": torch.tensor([1, 5, 9]), "return_dict": False, **(fixed or {})})

    return call


def _flux() -> Call:
    sizes = {"hidden_states": (3, 16, 8), "encoder_hidden_states": TEXT, "pooled_projections": (3, 16)}
    call = _steps({"timestep": torch.tensor([0.1, 0.5, 0.9])}, **sizes)()
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(4, 3)}
    return Call({**call.kwargs, **places}, {**call.shapes, "img_ids": {}, "txt_ids": {}})


BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CROSSING = {
    **BLOCKS,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
CODING = {**BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
PATCHES = {**HEADS, "sample_size": 16, "in_channels": 4, "num_layers": 2}
ALONE = partial(images, "sample", 32)

DIFFUSERS = {
    "unet_2d_condition": _diffusers(
        "UNet2DConditionModel",
        _steps(sample=(3, 4, 16, 16), encoder_hidden_states=TEXT),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **CROSSING,
    ),
    "vq": _diffusers("VQModel", ALONE, latent_channels=3, num_vq_embeddings=16, **CODING),
    "autoencoder_tiny": _diffusers(
        "AutoencoderTiny",
        ALONE,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    "dit": _diffusers(
        "DiTTransformer2DModel",
        _steps({"class_labels": torch.tensor([1, 2, 3])}, hidden_states=(3, 4, 16, 16)),
        out_channels=8,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
        **PATCHES,
    ),
    "sd3": _diffusers(
        "SD3Transformer2DModel",
        _steps(hidden_states=(3, 4, 16, 16), encoder_hidden_states=TEXT, pooled_projections=(3, 16)),
        patch_size=2,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
        **PATCHES,
    ),
    "flux": _diffusers(
        "FluxTransformer2DModel",
        _flux,
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
        **HEADS,
    ),
    "prior": _diffusers(
        "PriorTransformer",
        _steps(hidden_states=(3, 16), proj_embedding=(3, 16), encoder_hidden_states=(3, 7, 16)),
        num_layers=1,
        embedding_dim=16,
        num_embeddings=7,
        additional_embeddings=4,
        **HEADS,
    ),
}
