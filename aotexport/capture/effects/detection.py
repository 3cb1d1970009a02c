"""Functions of torchvision's detectors that loop or branch on data, in a form that serves any number of boxes.

Source: torchvision 0.28, `torchvision/ops/boxes.py`, `batched_nms`; `torchvision/models/detection/roi_heads.py`,
`heatmaps_to_keypoints`, `paste_masks_in_image`; `transform.py`, `GeneralizedRCNNTransform.batch_images`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from aotexport.process.patches import Patch

_FEW = {"cpu": 4000}
"""Numbers in boxes, by device, up to which torchvision suppresses the boxes of all classes at once."""
_FEW_ELSEWHERE = 100_000


def patches() -> list[Patch]:
    """Return the patches of the functions, where detectors find them, whose modules are loaded."""
    # `batch_images` rounds sizes by `int` and `float`, which ask for the example's.
    transform = {"paste_masks_in_image": paste_masks_in_image, "int": torch.sym_int, "float": torch.sym_float}
    replacements: dict[str, dict[str, Any]] = {
        "torchvision.ops.boxes": {"batched_nms": batched_nms},
        "torchvision.models.detection.roi_heads": {"heatmaps_to_keypoints": heatmaps_to_keypoints},
        "torchvision.models.detection.transform": transform,
    }
    return [
        Patch(sys.modules[path], name, function, "Serve any number of boxes, and images of any size")
        for path, functions in replacements.items()
        if path in sys.modules
        for name, function in functions.items()
    ]


def batched_nms(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return which of `boxes` (`[boxes, 4]`) no better box of their class (`idxs`) overlaps, the best first."""
    suppress = partial(torch.ops.torchvision.nms, iou_threshold=iou_threshold)

    def at_once(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor) -> torch.Tensor:
        # Each class gets a region of its own. Without boxes there is no largest coordinate.
        largest = torch.cat([boxes.flatten(), boxes.new_full((1,), -torch.inf)]).max()
        offsets = idxs.to(boxes) * (largest + torch.tensor(1).to(boxes))
        return _places(suppress(boxes + offsets[:, None], scores), idxs)

    def by_class(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor) -> torch.Tensor:
        count = torch.cat([idxs, idxs.new_full((1,), -1)]).max() + 1

        def one(index: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            own = torch.where(idxs == index)[0]
            return index + 1, mask.index_fill(0, own[suppress(boxes[own], scores[own])], True)

        start = torch.zeros_like(count), torch.zeros_like(scores, dtype=torch.bool)
        kept = torch.where(torch.while_loop(lambda index, _: index < count, one, start)[1])[0]
        return _places(kept[scores[kept].sort(descending=True)[1]], idxs)

    few = boxes.numel() <= _FEW.get(boxes.device.type, _FEW_ELSEWHERE)
    places = torch.cond(few, at_once, by_class, (boxes, scores, idxs))
    kept = torch.where(places >= 0)[0]
    return kept[places[kept].argsort()]


def _places(order: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Return the place of each box in an order of some of them, -1 for others: branches return tensors of one size."""
    return torch.full_like(boxes, -1).index_copy(0, order, torch.arange(order.shape[0], device=order.device))


def heatmaps_to_keypoints(maps: torch.Tensor, rois: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each heatmap (`[boxes, keypoints, side, side]`), resized to its box (`[boxes, 4]`), is the greatest.

    Returns:
        x, y and 1, `[boxes, keypoints, 3]`; the greatest values, `[boxes, keypoints]`.
    """
    count = maps.shape[1]
    sizes = (rois[:, 2:] - rois[:, :2]).clamp(min=1)
    whole = sizes.ceil()

    def one(
        index: torch.Tensor, places: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row = index[None]
        width, height = whole[row][0].to(torch.int64).tolist()
        resized = functional.interpolate(
            maps[row][0][:, None], size=(height, width), mode="bicubic", align_corners=False
        )[:, 0]
        best = resized.reshape(count, -1).argmax(dim=1)
        x = best % width
        y = torch.div(best - x, width, rounding_mode="floor")
        pixel, corner = sizes[row][0] / whole[row][0], rois[row][0]
        place = [(x.float() + 0.5) * pixel[0] + corner[0], (y.float() + 0.5) * pixel[1] + corner[1]]
        score = resized[torch.arange(count, device=maps.device), y, x]
        place = torch.stack([*place, torch.ones_like(place[0])])[None]
        return index + 1, places.index_copy(0, row, place), scores.index_copy(0, row, score[None])

    start = (
        torch.zeros((), dtype=torch.int64, device=maps.device),
        torch.zeros(rois.shape[0], 3, count, device=maps.device),
        torch.zeros(rois.shape[0], count, device=maps.device),
    )
    _, places, scores = torch.while_loop(lambda index, *_: index < rois.shape[0], one, start)
    return places.permute(0, 2, 1), scores


def paste_masks_in_image(
    masks: torch.Tensor, boxes: torch.Tensor, img_shape: tuple[int, int], padding: int = 1
) -> torch.Tensor:
    """Resize masks (`[boxes, 1, side, side]`) to their boxes (`[boxes, 4]`), and paste each into an image of zeros.

    Returns:
        `[boxes, 1, height, width]`; boxes grow by the share of the pixels of zeros around each mask.
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
    """Return the weights of bilinear interpolation along one axis, `[boxes, length, side]`: zeros outside of a box."""
    side = masks.shape[-1]
    size = (last - first + 1).clamp(min=1)[:, None]
    pixels = torch.arange(length, device=masks.device) - first[:, None]
    # Source: torch 2.13, `aten/src/ATen/native/UpSample.h`, `area_pixel_compute_source_index`.
    source = ((side / size.to(masks.dtype)) * (pixels.to(masks.dtype) + 0.5) - 0.5).clamp(min=0)
    # The last pixel stands for those after it.
    distance = source.clamp(max=side - 1)[:, :, None] - torch.arange(side, device=masks.device).to(masks.dtype)
    within = (pixels >= 0) & (pixels < size)
    return (1 - distance.abs()).clamp(min=0) * within[:, :, None].to(masks.dtype)
