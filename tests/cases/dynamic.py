"""Dynamic sizes: named, equal, derived, data-dependent."""

import logging
import math

import torch
from torch import nn
from torch.export import Dim

from tests.cases import case, slow_case
from tests.cases.mutations import leaf

BATCH = Dim("batch", min=1, max=64)
LENGTH = Dim("length", min=2, max=32)
HALF = Dim("half", min=1, max=16)
LOGGER = logging.getLogger(__name__)


@slow_case(lambda: (leaf(1, 3, 4),), dynamic_shapes=({0: BATCH},))
class OneRowOfSequences(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2), nn.GELU(), nn.Flatten(), nn.Linear(6, 2))


@case(lambda: (leaf(4, 3),), dynamic_shapes=({0: BATCH},))
def number_of_elements_of_a_size(x):
    return x.reshape(x.shape.numel()) / x.shape.numel()


@case(lambda: (leaf(4, 3), leaf(8)), dynamic_shapes=({0: HALF}, {0: 2 * HALF}))
def derived_dimension(x, y):
    return x.sum(1) + y.view(-1, 2).sum(1)


@case(lambda: (leaf(4, 3),), dynamic_shapes=({0: BATCH},), forward_only="it works only for the example's size of")
def backward_that_asks_for_the_size(x):
    return x.unsqueeze(1).expand(-1, 2, -1).as_strided((x.shape[0], 2, 2), (3, 1, 1)).sin()


@slow_case(
    lambda: (torch.randn(4, 3),),
    dynamic_shapes=({0: BATCH},),
    members=lambda: {"norm": nn.BatchNorm1d(3), "linear": nn.Linear(3, 2), "rows": torch.zeros((), dtype=torch.long)},
)
def dynamic_module(self, x):
    self.rows.add_(x.shape[0])
    return nn.functional.relu(self.linear(self.norm(x)))


@case(lambda: (leaf(4, 3), 3, [2, 5]), dynamic_shapes={"x": {0: BATCH}, "n": Dim.DYNAMIC, "more": [Dim.DYNAMIC, None]})
def dynamic_integers(x, n, more):
    return x * n - more[0] * more[1], n + more[0], torch.arange(6) < n


@case(lambda: (torch.randn(4, 6), 2), dynamic_shapes={"x": None, "n": Dim("n", min=1, max=5)})
class IntegerAsSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, n):
        y = self.linear(x)
        return y[:, :n].sum(), y.roll(n, 1), torch.zeros(n)


@slow_case(lambda: (leaf(1, 6),), dynamic_shapes=({0: BATCH},))
def example_of_one_row(x):
    return torch.einsum("bi,ci->bc", x, x).softmax(-1) @ x, x.view(-1)


@case(lambda: (leaf(4, 6),), dynamic_shapes=({0: BATCH},))
def python_functions_of_sizes(x):
    rows = len(x)
    blocks = x[: max(rows // 2, 1)] / math.sqrt(rows) + torch.tensor(rows)
    return blocks, x[round(rows / 3) :], torch.linspace(0, 1, rows), torch.zeros(int(rows * 1.5))


@case(lambda: (leaf(6, 8),), dynamic_shapes=({0: Dim("rows", min=2, max=64)},))
def sizes_converted_by_python(x):
    rows = int(math.ceil(float(int(x.shape[0])) / 4) * 4)
    return x.new_zeros(rows, 3), x / float(x.shape[0])


@case(lambda: (leaf(4, 6),), dynamic_shapes=({0: BATCH, 1: LENGTH},))
def tensors_of_sizes(x):
    rows, columns = x.shape
    shapes = torch.as_tensor([(rows, columns), (1, 2)], dtype=torch.int32, device=x.device)
    halves = torch.asarray([rows / 2]), x.new_tensor([columns]), x.new_tensor([[rows]], dtype=torch.int64)
    return x * shapes.prod(), torch.as_tensor(x.shape), *halves


@slow_case(
    lambda: (leaf(1, 8, 2, 2), leaf(8, 8, 3, 3), leaf(2, 8, 3, 3)),
    dynamic_shapes=({2: Dim("height", min=1, max=20), 3: Dim("width", min=1, max=20)}, None, None),
    forward_only="works only for the example's size",
)
def maps_of_one_pixel(x, weight, head):
    """Flatten a map that has one pixel in the example, as detectors do."""
    halved = nn.functional.conv2d(x, weight, stride=2, padding=1)
    scores = nn.functional.conv2d(halved.relu(), head, padding=1)
    height, width = scores.shape[2:]
    rows = scores.view(1, 2, 1, height, width).permute(0, 3, 4, 1, 2).reshape(1, -1, 1)
    return rows.flatten().sigmoid(), rows.split(height * width, dim=1)[0] * 2


@case(lambda: (leaf(4, 6),), dynamic_shapes=({0: BATCH, 1: LENGTH},))
def sizes_in_messages(x):
    torch._assert(x.dim() == 2, f"expected two axes, got {tuple(x.shape)}")
    torch._assert(x.shape[1] > 1, "expected more than one column, got " + str(x.shape[1]))
    LOGGER.debug(f"{x.shape[0]} rows")
    rows = -(-x.shape[0] // 4) * 4
    padded = x.new_zeros(rows, 2 * x.shape[1])
    padded[: x.shape[0], : x.shape[1]].copy_(x)
    return padded * 2


@case(lambda: (leaf(2, 1, 4, 4), leaf(2, 2, 3)), dynamic_shapes=({0: BATCH}, {0: BATCH}))
def sampled_where_a_grid_says(x, theta):
    grid = nn.functional.affine_grid(theta, x.shape, align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


@case(lambda: (leaf(4, 6), leaf(6, 6)), dynamic_shapes=({0: BATCH}, {0: LENGTH}))
def padded_to_the_longest(x, y):
    rows = max(len(x), len(y))
    rows = rows + -rows % 4
    pad = nn.functional.pad
    return torch.stack([pad(t, (0, 0, 0, rows - t.shape[0])) for t in (x, y)]).unflatten(1, (-1, 4)).sum(2)


@slow_case(lambda: (leaf(1, 2, 9, 8),), dynamic_shapes=({2: LENGTH, 3: LENGTH - 1},))
def resized_image(x):
    half = nn.functional.interpolate(x, scale_factor=0.5, mode="bilinear")
    back = nn.functional.interpolate(half, size=x.shape[-2:], mode="bilinear")
    return back, nn.functional.adaptive_avg_pool2d(x, 1)


@case(
    lambda: (leaf(3, 9, 7), torch.tensor([[1, 2, 0, 4], [5, 0, 0, 1], [6, 2, 3, 2]])),
    dynamic_shapes=({0: BATCH}, {0: BATCH}),
)
def loss_of_labels_without_blanks(logits, labels):
    labelled = labels != 0
    lengths, log_probs = torch.full((logits.shape[0],), 9), logits.log_softmax(-1).transpose(0, 1)
    return nn.functional.ctc_loss(log_probs, labels.masked_select(labelled), lengths, labelled.sum(-1))


@case(lambda: torch.linspace(-1, 1, 40).reshape(10, 4).split(5), dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))
def parts_of_one_tensor(x, y):
    return x * y, y[1:]


@case(
    lambda: (leaf(4, 6), torch.rand(6) + 0.1),
    dynamic_shapes=({0: BATCH}, None),
    forward_only="Cannot call numel() on tensor with symbolic sizes/strides",
)
def fake_quantised(x, scale):
    point = torch.zeros(6, dtype=torch.int32)
    per_channel = torch.fake_quantize_per_channel_affine(x, scale, point, 1, -8, 7)
    per_tensor = torch.fake_quantize_per_tensor_affine(x.t(), scale[0], point[0], -8, 7)
    return per_channel, per_tensor, torch.fake_quantize_per_tensor_affine(x, 0.1, 1, 0, 15)


@case(lambda: (leaf(4, 3),), dynamic_shapes=({0: BATCH},))
def pairs_without_themselves(x):
    pairs = torch.ones_like(x @ x.t())
    pairs.fill_diagonal_(0)
    return pairs * (x @ x.t())


@case(lambda: (leaf(10, 3),), dynamic_shapes=({0: Dim("rows", min=9, max=11)},))
def rounded_up_to_fours(x):
    fours = x.shape[0] / 4
    return x if fours.is_integer() else nn.functional.pad(x, (0, 0, 0, math.ceil(fours) * 4 - x.shape[0]))
