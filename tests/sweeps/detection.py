"""Models of transformers that find objects and segments: inference with dynamic batch, height and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from torch.export import Dim

from tests.sweeps.sample import Items, Sample

BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
DETR = {
    "backbone": None,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 5,
    "num_labels": 3,
}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}


def _resnet(*stages: str) -> transformers.ResNetConfig:
    return transformers.ResNetConfig(**BACKBONE, out_features=list(stages))


def _detr(name: str) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(name, **DETR, backbone_config=_resnet("stage4"))
    return transformers.AutoModelForObjectDetection.from_config(config)


def _rt_detr() -> transformers.PreTrainedModel:
    backbone = transformers.RTDetrResNetConfig(**BACKBONE, out_features=["stage2", "stage3", "stage4"])
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 8, 16],
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        decoder_layers=1,
        decoder_in_channels=[16, 16, 16],
        num_queries=5,
        num_labels=3,
        **heads,
    )
    return transformers.RTDetrForObjectDetection(config)


def _yolos() -> transformers.PreTrainedModel:
    config = transformers.YolosConfig(**LAYERS, image_size=[64, 64], patch_size=16, num_detection_tokens=5)
    return transformers.YolosForObjectDetection(config)


def _segformer() -> transformers.PreTrainedModel:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def _upernet() -> transformers.PreTrainedModel:
    stages = _resnet("stage1", "stage2", "stage3", "stage4")
    config = transformers.UperNetConfig(
        backbone_config=stages,
        hidden_size=8,
        pool_scales=[1, 2],
        auxiliary_channels=8,
        auxiliary_in_channels=8,
        num_labels=3,
    )
    return transformers.UperNetForSemanticSegmentation(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "conditional_detr": partial(_detr, "conditional_detr"),
    "detr": partial(_detr, "detr"),
    "rt_detr": _rt_detr,
    "segformer": _segformer,
    "table-transformer": partial(_detr, "table-transformer"),
    "upernet": _upernet,
    "yolos": _yolos,
}

EXCLUDED: dict[str, str] = {}
"""Models that are not run, with the reason."""


def items() -> Items:
    """Return the models, by name."""
    return {name: partial(_samples, name) for name in MODELS}


def _samples(name: str) -> Iterator[Sample]:
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    height, width = (32 * Dim(axis, min=2, max=20) for axis in ("height", "width"))
    shapes = {"pixel_values": {0: Dim("batch", min=1, max=16), 2: height, 3: width}}
    inputs = {"pixel_values": torch.randn(2, 3, 64, 96)}
    yield Sample(module, (), inputs, {"dynamic_shapes": shapes, "programs": ["infer"]})
