"""Models of timm, torchvision and segmentation_models_pytorch, made small."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from tests.sweeps.made import Call, Model, images, made, sizes, the


def _torchvision(name: str, /, *args: Any, side: int = 64, classes: bool = True, **options: Any) -> Model:
    options |= {"num_classes": 5} if classes else {}
    return made(f"torchvision.models.{name}", *args, **options), partial(images, side=side)


def _segmentation(name: str, /, side: int = 64, **options: Any) -> Model:
    options |= {"encoder_name": "tu-test_resnet", "encoder_weights": None, "classes": 3}
    return made(f"segmentation_models_pytorch.{name}", **options), partial(images, side=side)


TIMM: dict[str, Model] = {
    name: (
        made(path, *args, num_classes=5, **{key: sizes(one) for key, one in options.items()}),
        partial(images, side=side),
    )
    for name, (path, args, side, options) in json.loads(Path(__file__).with_name("timm.json").read_text()).items()
}


def _deeplab() -> Model:
    features = made("torchvision.models.mobilenet_v3_small", width_mult=0.25)
    layers = made(
        "torchvision.models._utils.IntermediateLayerGetter",
        made("builtins.getattr", features, "features"),
        {"12": "out"},
    )
    head = made("torchvision.models.segmentation.deeplabv3.DeepLabHead", 144, 5, (2, 4))
    return _torchvision("segmentation.DeepLabV3", layers, head, classes=False)


def _blocks(kind: str, config: str, *sizes: tuple[Any, ...]) -> Model:
    return _torchvision(kind, [made(f"torchvision.models.{config}", *size) for size in sizes], 0.2)


TORCHVISION = {
    "mobilenet_v3": _torchvision("mobilenet_v3_small", width_mult=0.25),
    "shufflenet_v2": _torchvision("ShuffleNetV2", [1, 1, 1], [8, 16, 32, 32, 64]),
    "squeezenet": _torchvision("squeezenet1_1"),
    "densenet": _torchvision("DenseNet", 4, (1, 1, 1, 1), 8),
    "vit": _torchvision("VisionTransformer", 32, 8, 2, 2, 32, 64, side=32),
    "swin": _torchvision("SwinTransformer", [2, 2], 16, [1, 1], [2, 2], [4, 4], side=32),
    "efficientnet": _blocks(
        "EfficientNet", "efficientnet.MBConvConfig", (1, 3, 1, 8, 8, 1, 1.0, 1.0), (4, 5, 2, 8, 16, 1, 1.0, 1.0)
    ),
    "convnext": _blocks("ConvNeXt", "convnext.CNBlockConfig", (8, 16, 1), (16, None, 1)),
    "resnet": _torchvision("ResNet", the("torchvision.models.resnet.BasicBlock"), [1, 1, 1, 1]),
    "regnet": _torchvision(
        "RegNet", made("torchvision.models.regnet.BlockParams", [1, 1], [8, 16], [8, 8], [1.0, 1.0], [2, 2], 0.25)
    ),
    "deeplab_v3": _deeplab(),
}


class OneImage(torch.nn.Module):
    """A detector of torchvision that takes one image: `[3, height, width]`."""

    def __init__(self, detector: torch.nn.Module) -> None:
        """Hold the detector."""
        super().__init__()
        self.detector = detector

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return boxes, labels and scores, and masks or keypoints."""
        return self.detector([image])[0]


def _image() -> Call:
    shapes = {"image": {axis + 1: Dim(name, min=64, max=640) for axis, name in enumerate(("height", "width"))}}
    return Call({"image": torch.rand(3, 120, 150)}, shapes, {"programs": ["infer"]})


def _detector(name: str, /, **options: Any) -> Model:
    options |= {"weights": None, "weights_backbone": None, "num_classes": 4}
    return made("tests.sweeps.vision_models.OneImage", made(f"torchvision.models.detection.{name}", **options)), _image


# Random weights score no object above the thresholds of trained ones.
RESIZED = {"min_size": 96, "max_size": 160}
ONE_STAGE = {"score_thresh": 0.0, "detections_per_img": 10, "topk_candidates": 20}
TWO_STAGES = {"box_score_thresh": 0.0, "box_detections_per_img": 10, "rpn_post_nms_top_n_test": 40} | RESIZED
TORCHVISION |= {
    "faster_rcnn": _detector("fasterrcnn_resnet50_fpn", **TWO_STAGES),
    "faster_rcnn_v2": _detector("fasterrcnn_resnet50_fpn_v2", **TWO_STAGES),
    "fcos": _detector("fcos_resnet50_fpn", **ONE_STAGE, **RESIZED),
    "keypoint_rcnn": _detector("keypointrcnn_resnet50_fpn", **TWO_STAGES),
    "mask_rcnn": _detector("maskrcnn_resnet50_fpn", **TWO_STAGES),
    "retinanet": _detector("retinanet_resnet50_fpn", **ONE_STAGE, **RESIZED),
    "ssd": _detector("ssd300_vgg16", **ONE_STAGE),
    "ssdlite": _detector("ssdlite320_mobilenet_v3_large", **ONE_STAGE),
}

DECODER = {"decoder_channels": (32, 16, 16, 8, 8)}
SEGMENTATION = {
    "unet": _segmentation("Unet", **DECODER),
    "linknet": _segmentation("Linknet"),
    "fpn": _segmentation("FPN", decoder_pyramid_channels=16, decoder_segmentation_channels=32),
    "pspnet": _segmentation("PSPNet", psp_out_channels=16),
    "upernet": _segmentation("UPerNet", decoder_channels=16),
}
