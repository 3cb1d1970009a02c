"""Models of transformers that find objects and segments: inference with dynamic batch, and height and width if any."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch.export import Dim

from tests.sweeps.made import Call
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


STAGES = ["stage1", "stage2", "stage3", "stage4"]
BATCH = Dim("batch", min=1, max=16)


def _resnet(*stages: str) -> transformers.ResNetConfig:
    return transformers.ResNetConfig(**BACKBONE, out_features=list(stages))


def _detr(name: str, *stages: str, **options: Any) -> transformers.PreTrainedModel:
    config = {**DETR, "backbone_config": _resnet(*(stages or STAGES[3:])), **options}
    return transformers.AutoModelForObjectDetection.from_config(transformers.AutoConfig.for_model(name, **config))


def _mask2former() -> transformers.PreTrainedModel:
    config = transformers.Mask2FormerConfig(
        backbone_config=_resnet(*STAGES),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=5,
        num_labels=3,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config)


def _maskformer() -> transformers.PreTrainedModel:
    decoder = transformers.DetrConfig(**{**DETR, "d_model": 32}, backbone_config=_resnet("stage4"))
    config = transformers.MaskFormerConfig(
        backbone_config=_resnet(*STAGES),
        fpn_feature_size=32,
        mask_feature_size=32,
        decoder_config=decoder,
        num_labels=3,
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def _sam() -> transformers.PreTrainedModel:
    vision = {
        "hidden_size": 16,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "mlp_ratio": 2.0,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
    }
    decoder = {"mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    config = transformers.SamConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "num_hidden_layers": 2, **decoder},
    )
    return transformers.SamModel(config)


def _rt_detr(version: str) -> transformers.PreTrainedModel:
    backbone = transformers.RTDetrResNetConfig(**BACKBONE, out_features=STAGES[1:])
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = getattr(transformers, f"RTDetr{version}Config")(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 8, 16],
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        decoder_layers=2 if version else 1,
        decoder_in_channels=[16, 16, 16],
        num_queries=5,
        num_labels=3,
        **heads,
    )
    return getattr(transformers, f"RTDetr{version}ForObjectDetection")(config)


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
    config = transformers.UperNetConfig(
        backbone_config=_resnet(*STAGES),
        hidden_size=8,
        pool_scales=[1, 2],
        auxiliary_channels=8,
        auxiliary_in_channels=8,
        num_labels=3,
    )
    return transformers.UperNetForSemanticSegmentation(config)


def _images() -> Call:
    height, width = (32 * Dim(axis, min=2, max=20) for axis in ("height", "width"))
    return Call({"pixel_values": torch.randn(2, 3, 64, 96)}, {"pixel_values": {0: BATCH, 2: height, 3: width}})


def _prompted() -> Call:
    points = {"pixel_values": torch.randn(2, 3, 64, 64), "input_points": 64 * torch.rand(2, 1, 2, 2)}
    return Call(points, {name: {0: BATCH} for name in points})


FEATURES = {"d_model": 32, "decoder_layers": 2, "num_feature_levels": 3, "disable_custom_kernels": True}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "conditional_detr": partial(_detr, "conditional_detr"),
    "dab-detr": partial(_detr, "dab-detr", hidden_size=16),
    "deformable_detr": partial(_detr, "deformable_detr", *STAGES[1:], **FEATURES),
    "detr": partial(_detr, "detr"),
    "mask2former": _mask2former,
    "maskformer": _maskformer,
    "rt_detr": partial(_rt_detr, ""),
    "rt_detr_v2": partial(_rt_detr, "V2"),
    "sam": _sam,
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
    call = _prompted() if name == "sam" else _images()
    yield Sample(module, (), call.kwargs, {"dynamic_shapes": call.shapes, "programs": ["infer"]})
