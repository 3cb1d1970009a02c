"""Masks pasted into images, beside a loop over the boxes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from aotexport.capture.effects.pasted_masks import paste_masks_in_image

HEIGHT, WIDTH, SIDE = 40, 60, 7
BOXES = {
    "within": [[10.2, 5.7, 30.9, 20.1], [0.0, 0.0, 60.0, 40.0]],
    "at the edge": [[50.0, 30.0, 60.0, 40.0], [0.0, 0.0, 3.5, 2.5]],
    "of no size": [[20.0, 20.0, 20.0, 20.0], [0.0, 5.0, 0.0, 30.0]],
    "larger than its mask": [[5.0, 5.0, 55.0, 38.0]],
    "none": [],
}


def one_by_one(masks, boxes):
    """Paste one mask after the other by slices: torchvision 0.28's result."""
    masks = functional.pad(masks, (1, 1, 1, 1))
    scale = (SIDE + 2) / SIDE
    images = []
    for mask, (left, top, right, bottom) in zip(masks, boxes.tolist(), strict=True):
        half_width, half_height = (right - left) * 0.5 * scale, (bottom - top) * 0.5 * scale
        x, y = (left + right) * 0.5, (top + bottom) * 0.5
        ends = x - half_width, y - half_height, x + half_width, y + half_height
        left, top, right, bottom = (int(end) for end in ends)
        size = max(bottom - top + 1, 1), max(right - left + 1, 1)
        resized = functional.interpolate(mask[None], size=size, mode="bilinear", align_corners=False)[0, 0]
        rows = slice(max(top, 0), min(bottom + 1, HEIGHT))
        columns = slice(max(left, 0), min(right + 1, WIDTH))
        image = torch.zeros(HEIGHT, WIDTH, dtype=masks.dtype)
        image[rows, columns] = resized[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        images.append(image)
    return torch.stack(images)[:, None] if images else masks.new_empty(0, 1, HEIGHT, WIDTH)


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
def test_masks_and_gradients_are_those_of_a_loop(boxes):
    boxes = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    masks = torch.rand(len(boxes), 1, SIDE, SIDE, dtype=torch.float64, requires_grad=True)
    pasted, expected = paste_masks_in_image(masks, boxes, (HEIGHT, WIDTH)), one_by_one(masks, boxes)
    torch.testing.assert_close(pasted, expected)
    if len(boxes):
        found, eager = (torch.autograd.grad(image.square().sum(), masks) for image in (pasted, expected))
        torch.testing.assert_close(found, eager)
