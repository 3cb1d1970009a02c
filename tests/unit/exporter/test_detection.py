"""Functions of detectors for any number of boxes, beside loops over the boxes."""

import pytest
import torch
from torch.nn import functional

from aotexport.capture.effects.detection import batched_nms, heatmaps_to_keypoints, paste_masks_in_image

# Torchvision calls it.
pytestmark = pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")

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


def overlap(box, others):
    """Return the share of the area that a box has in common with each of others."""
    corners = torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])
    common = corners.clamp(min=0).prod(1)
    return common / ((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common)


def nms(boxes, scores, iou_threshold):
    """Keep the best box, drop what overlaps it, and so on."""
    order, kept = scores.sort(stable=True, descending=True)[1], []
    while len(order):
        kept.append(order[0])
        order = order[1:][overlap(boxes[order[0]], boxes[order[1:]]) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


@pytest.fixture(scope="module")
def suppression():
    """Have `torchvision::nms`, as torchvision declares it, where torchvision is not loaded."""
    if hasattr(torch.ops.torchvision, "nms"):
        yield
        return
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", nms, "CPU")

        @torch.library.register_fake("torchvision::nms", lib=library)
        def kept(dets, scores, iou_threshold):
            return dets.new_empty(torch.library.get_ctx().create_unbacked_symint(), dtype=torch.int64)

        yield


def crowd(count):
    """Return overlapping boxes, their scores and classes."""
    generator = torch.Generator().manual_seed(count)
    corners = torch.rand(count, 2, generator=generator) * 300
    boxes = torch.cat([corners, corners + torch.rand(count, 2, generator=generator) * 80], 1)
    # Many have the same score.
    scores = torch.randint(1, 20, (count,), generator=generator) / 20
    return boxes, scores, torch.randint(0, 7, (count,), generator=generator)


def best(boxes, scores, classes, threshold=0.5):
    """Return the boxes that no better one of their class overlaps, the best first."""
    of_class = [torch.where(classes == own)[0] for own in range(7)]
    kept = torch.cat([own[nms(boxes[own], scores[own], threshold)] for own in of_class]).sort()[0]
    return kept[scores[kept].sort(stable=len(boxes) <= 1000, descending=True)[1]]


@pytest.mark.usefixtures("suppression")
@pytest.mark.parametrize("count", [0, 1, 2, 300, 1000, 1001])
def test_boxes_of_each_class_are_suppressed_apart(count):
    boxes, scores, classes = crowd(count)
    assert torch.equal(batched_nms(boxes, scores, classes, 0.5), best(boxes, scores, classes))


def best_places(maps, boxes):
    """Return where each resized map is the greatest, one box after the other: torchvision 0.28's result."""
    places, scores = torch.zeros(len(boxes), maps.shape[1], 3), torch.zeros(len(boxes), maps.shape[1])
    for index, (left, top, right, bottom) in enumerate(boxes):
        width, height = (right - left).clamp(min=1), (bottom - top).clamp(min=1)
        size = int(height.ceil()), int(width.ceil())
        resized = functional.interpolate(maps[index][:, None], size=size, mode="bicubic", align_corners=False)[:, 0]
        for keypoint, image in enumerate(resized):
            best = int(image.argmax())
            x = (best % size[1] + 0.5) * (width / size[1]) + left
            y = (best // size[1] + 0.5) * (height / size[0]) + top
            places[index, keypoint] = torch.stack([x, y, torch.ones(())])
            scores[index, keypoint] = image.flatten()[best]
    return places, scores


def example(count):
    boxes, scores, _ = crowd(count)
    return torch.randn(count, 3, SIDE, SIDE), boxes, scores


def test_keypoints_are_those_of_a_loop():
    maps, boxes, _ = example(8)
    torch.testing.assert_close(heatmaps_to_keypoints(maps, boxes), best_places(maps, boxes))
