"""Models of timm, torchvision and segmentation_models_pytorch, made small."""

from functools import partial
from typing import Any

import torch
from torch.export import Dim

from tests.sweeps.made import Call, Model, images, made, the


def _timm(name: str, /, **options: Any) -> Model:
    side = options.get("img_size", 64)
    return made("timm.create_model", name, num_classes=5, **options), partial(images, side=side)


def _of_timm(path: str, /, side: int = 64, **options: Any) -> Model:
    """Return a model of a class of timm, by its path after `timm.models`."""
    return made(f"timm.models.{path}", num_classes=5, **options), partial(images, side=side)


def _torchvision(name: str, /, *args: Any, side: int = 64, classes: bool = True, **options: Any) -> Model:
    options |= {"num_classes": 5} if classes else {}
    return made(f"torchvision.models.{name}", *args, **options), partial(images, side=side)


def _segmentation(name: str, /, side: int = 64, **options: Any) -> Model:
    options |= {"encoder_name": "tu-test_resnet", "encoder_weights": None, "classes": 3}
    return made(f"segmentation_models_pytorch.{name}", **options), partial(images, side=side)


PATCHES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
TIMM = {
    "resnet": _timm("resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "vit": _timm("vit_tiny_patch16_224", **PATCHES),
    "deit": _timm("deit_tiny_distilled_patch16_224", **PATCHES),
    "beit": _timm("beit_base_patch16_224", **PATCHES),
    "cait": _timm("cait_xxs24_224", **PATCHES),
    "xcit": _timm("xcit_nano_12_p16_224", **{**PATCHES, "patch_size": 16}),
    "mixer": _of_timm("MlpMixer", 32, img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    "convnext": _timm("convnext_atto", **STAGES),
    "convmixer": _of_timm("ConvMixer", dim=16, depth=2, kernel_size=3),
    "gcvit": _of_timm(
        "GlobalContextVit",
        img_size=64,
        embed_dim=8,
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 2, 2),
        window_size=(4, 4, 4, 2),
    ),
    "inception_next": _of_timm("inception_next.MetaNeXt", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    "levit": _of_timm("Levit", img_size=64, embed_dim=(16, 16), key_dim=8, depth=(1, 1), num_heads=(2, 2)),
    "sequencer": _of_timm(
        "Sequencer2d",
        28,
        img_size=28,
        layers=(1, 1),
        patch_sizes=(7, 2),
        embed_dims=(8, 16),
        hidden_sizes=(4, 8),
        mlp_ratios=(2.0, 2.0),
    ),
    "starnet": _of_timm("starnet.StarNet", base_dim=8, depths=(1, 1)),
    "swiftformer": _of_timm("swiftformer.SwiftFormer", layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16)),
    "twins": _of_timm("Twins", 32, img_size=32, embed_dims=(8, 16), num_heads=(1, 2), depths=(1, 1), sr_ratios=(2, 1)),
    "volo": _of_timm(
        "VOLO",
        32,
        img_size=32,
        layers=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 16),
        num_heads=(2, 2, 2, 2),
        use_aux_head=False,
    ),
    "test_mambaout": _timm("test_mambaout"),
    "test_nfnet": _timm("test_nfnet"),
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
