"""Models of transformers that find objects and segments: inference with dynamic batch, and height and width if any."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.export import Dim

from tests.sweeps.made import Call
from tests.sweeps.sample import Items, Sample

BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
OPTIONS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Fields of configurations."""
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}


STAGES = ["stage1", "stage2", "stage3", "stage4"]
BATCH = Dim("batch", min=1, max=16)


def _resnet(*stages: str) -> transformers.ResNetConfig:
    return transformers.ResNetConfig(**BACKBONE, out_features=list(stages))


def _detr(name: str, *stages: str, **options: Any) -> transformers.PreTrainedModel:
    config = {**OPTIONS["detr"], "backbone_config": _resnet(*(stages or STAGES[3:])), **options}
    return transformers.AutoModelForObjectDetection.from_config(transformers.AutoConfig.for_model(name, **config))


def _mask2former() -> transformers.PreTrainedModel:
    config = transformers.Mask2FormerConfig(backbone_config=_resnet(*STAGES), **OPTIONS["mask2former"])
    return transformers.Mask2FormerForUniversalSegmentation(config)


def _maskformer() -> transformers.PreTrainedModel:
    decoder = transformers.DetrConfig(**{**OPTIONS["detr"], "d_model": 32}, backbone_config=_resnet("stage4"))
    config = transformers.MaskFormerConfig(
        backbone_config=_resnet(*STAGES),
        fpn_feature_size=32,
        mask_feature_size=32,
        decoder_config=decoder,
        num_labels=3,
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def _sam() -> transformers.PreTrainedModel:
    return transformers.SamModel(transformers.SamConfig(**OPTIONS["sam"]))


def _rt_detr(version: str) -> transformers.PreTrainedModel:
    backbone = transformers.RTDetrResNetConfig(**BACKBONE, out_features=STAGES[1:])
    options = {"backbone_config": backbone, "decoder_layers": 2 if version else 1, **OPTIONS["rt_detr"]}
    config = getattr(transformers, f"RTDetr{version}Config")(**options)
    return getattr(transformers, f"RTDetr{version}ForObjectDetection")(config)


def _yolos() -> transformers.PreTrainedModel:
    config = transformers.YolosConfig(**LAYERS, image_size=[64, 64], patch_size=16, num_detection_tokens=5)
    return transformers.YolosForObjectDetection(config)


def _segformer() -> transformers.PreTrainedModel:
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**OPTIONS["segformer"]))


def _upernet() -> transformers.PreTrainedModel:
    config = transformers.UperNetConfig(backbone_config=_resnet(*STAGES), **OPTIONS["upernet"])
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
