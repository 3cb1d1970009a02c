"""Torchvision's masks of objects, pasted into the image: all boxes at once, so that any number of boxes is served.

Torchvision pastes them in a Python loop with slices whose bounds are data.

Source: torchvision 0.28, `torchvision/models/detection/roi_heads.py`, `paste_masks_in_image`.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

from aotexport.process.patches import Patch

_CALLER = "torchvision.models.detection.transform"


def patches() -> list[Patch]:
    """Return the patch of the function where it is called, if that module is loaded."""
    module = sys.modules.get(_CALLER)
    if module is None:
        return []
    return [Patch(module, "paste_masks_in_image", paste_masks_in_image, "Paste the masks of any number of boxes")]


def paste_masks_in_image(
    masks: torch.Tensor, boxes: torch.Tensor, img_shape: tuple[int, int], padding: int = 1
) -> torch.Tensor:
    """Resize masks to their boxes and paste each into an image of zeros.

    Args:
        masks: probabilities, `[boxes, 1, side, side]`.
        boxes: left, top, right and bottom in pixels, `[boxes, 4]`.
        img_shape: height and width of the image.
        padding: pixels of zeros around each mask; the box grows by the same share.

    Returns:
        `[boxes, 1, height, width]`.
    """
    height, width = img_shape
    side = masks.shape[-1]
    masks = functional.pad(masks, (padding,) * 4)
    halves = (boxes[:, 2:] - boxes[:, :2]) * 0.5 * ((side + 2 * padding) / side)
    centers = (boxes[:, 2:] + boxes[:, :2]) * 0.5
    first, last = (centers - halves).to(torch.int64), (centers + halves).to(torch.int64)
    rows = _interpolation(masks, first[:, 1], last[:, 1], height)
    columns = _interpolation(masks, first[:, 0], last[:, 0], width)
    return (rows @ masks[:, 0] @ columns.mT)[:, None]


def _interpolation(masks: torch.Tensor, first: torch.Tensor, last: torch.Tensor, length: int) -> torch.Tensor:
    """Return what each pixel of the mask adds to each of the image along one axis.

    Args:
        masks: `[boxes, 1, side, side]`.
        first: first pixel of each box, `[boxes]`.
        last: its last pixel, `[boxes]`.
        length: pixels of the image.

    Returns:
        Weights of bilinear interpolation, zeros outside of the box, `[boxes, length, side]`.
    """
    side = masks.shape[-1]
    size = (last - first + 1).clamp(min=1)[:, None]
    pixels = torch.arange(length, device=masks.device) - first[:, None]
    # Source: torch 2.13, `aten/src/ATen/native/UpSample.h`, `area_pixel_compute_source_index`.
    source = ((side / size.to(masks.dtype)) * (pixels.to(masks.dtype) + 0.5) - 0.5).clamp(min=0)
    # The last pixel stands for those after it.
    distance = source.clamp(max=side - 1)[:, :, None] - torch.arange(side, device=masks.device).to(masks.dtype)
    within = (pixels >= 0) & (pixels < size)
    return (1 - distance.abs()).clamp(min=0) * within[:, :, None].to(masks.dtype)
