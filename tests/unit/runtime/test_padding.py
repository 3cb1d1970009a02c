"""Results that padding changes are found in the graph, and calls whose results it does not change are padded."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from aotexport_runtime.rows.padding import dependence_on_padding
from aotexport_runtime.values.sizes import symbols_of
from tests.unit.runtime.test_rows import exported_parts

WIDTH = 4


class Parts(nn.Module):
    """Parts of models that the functions below call."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.both_ways = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.positions = nn.Parameter(torch.randn(64, WIDTH))


def scores(x, mask=None):
    return x @ x.mT if mask is None else (x @ x.mT).masked_fill(mask[:, None] == 0, -torch.inf)


def steps(x):
    return torch.arange(x.shape[1])


def written(m, x, mask):
    y = x * mask[:, :, None]
    y.view(-1, WIDTH).add_(1)
    return y.sum(1)


DEPENDENT = {
    "mean": (lambda m, x, mask: x.mean(1), "mean.dim", "along axis 1 of `self`, where padding is 0"),
    "max": (lambda m, x, mask: x.amax(1), "amax.default", "along axis 1 of `self`, where padding is 0"),
    "sum_of_biases": (lambda m, x, mask: m.linear(x).sum(1), "sum.dim_IntList", "where padding may be any number"),
    "last": (lambda m, x, mask: x[:, -1], "select.int", "along axis 1 of `self`"),
    "reversed": (lambda m, x, mask: x.flip(1).cumsum(1), "flip.default", "along axis 1 of `self`"),
    "divided": (lambda m, x, mask: x.sum(1) / x.shape[1], "div.Tensor", "computes with the length"),
    "attention": (lambda m, x, mask: attend(x, x, x), "scaled_dot_product_attention.default", "axis 1 of `key`"),
    "queries_of_one_length": (
        lambda m, x, mask: attend(m.positions[:7].expand(x.shape[0], -1, -1), x, x, is_causal=True),
        "scaled_dot_product_attention.default",
        "along axis 1 of `key`, where padding is 0",
    ),
    "softmax": (lambda m, x, mask: scores(x).softmax(-1) @ x, "softmax.int", "axis 2 of `self`, where padding may be"),
    "lightly_masked": (
        lambda m, x, mask: (scores(x) + (1.0 - mask[:, None]) * -1.0).softmax(-1) @ x,
        "softmax.int",
        "where padding may be any number",
    ),
    "masked_other_way": (
        lambda m, x, mask: scores(x).masked_fill(mask[:, :, None] == 0, -torch.inf).softmax(-1).nan_to_num() @ x,
        "softmax.int",
        "axis 2 of `self`, where padding may be any number",
    ),
    "what_follows": (
        lambda m, x, mask: attend(x, x, x, steps(x)[:, None] <= steps(x)),
        "scaled_dot_product_attention.default",
        "along axis 1 of `key`, where padding is 0",
    ),
    "upper_part": (lambda m, x, mask: scores(x + 1).triu() @ (x + 1), "triu.default", "to keep padding apart"),
    "products": (lambda m, x, mask: (x + 1).mT @ (x + 1), "matmul.default", "axis 2 of `self`, where padding is 1"),
    "einsum": (lambda m, x, mask: torch.einsum("bld,ble->bde", x + 1, x + 1), "einsum.default", "where padding is 1"),
    "both_ways": (lambda m, x, mask: m.both_ways(x)[0], "lstm.input", "to keep padding apart"),
    "state": (lambda m, x, mask: m.lstm(x)[1][0], "lstm.input", "returns its state behind the last step"),
    "written": (written, "sum.dim_IntList", "where padding may be any number"),
    "shown_or_not": (
        lambda m, x, mask: attend(x, x, x, ((mask == 0) | (mask > -1))[:, None].expand(-1, x.shape[1], -1)),
        "scaled_dot_product_attention.default",
        "along axis 1 of `key`, where padding is 0",
    ),
}

INDEPENDENT = {
    "mean": lambda m, x, mask: (m.linear(x) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True),
    "pooled": lambda m, x, mask: (x.sum(-1).masked_fill(~mask.bool(), -torch.inf).softmax(1)[:, None] @ x)[:, 0],
    "greatest": lambda m, x, mask: torch.where(mask[:, :, None] > 0, x, -torch.inf).amax(1),
    "first": lambda m, x, mask: m.norm(x)[:, 0],
    "states": lambda m, x, mask: m.lstm(x)[0],
    "cumulated": lambda m, x, mask: (x + m.positions[: x.shape[1]]).cumsum(1),
    "attention": lambda m, x, mask: attend(x, x + 1, x + 2, mask.bool()[:, None]),
    "added": lambda m, x, mask: (scores(x) + (1.0 - mask[:, None]) * torch.finfo(x.dtype).min).softmax(-1) @ (x + 1),
    "weights": lambda m, x, mask: torch.einsum("bqk,bke->bqe", scores(x, mask).softmax(-1), m.linear(x)),
    "causal": lambda m, x, mask: attend(x, x, x, is_causal=True),
    "what_precedes": lambda m, x, mask: attend(x, x, x, (steps(x) + 0) <= steps(x)[:, None]),
    "triangle": lambda m, x, mask: scores(x + 1).tril() @ (x + 1),
    "scores_of_later": lambda m, x, mask: (
        (scores(x) + torch.full((x.shape[1],) * 2, -torch.inf).triu(1)).softmax(-1) @ x
    ),
    "chosen": lambda m, x, mask: mask[torch.arange(x.shape[0])[:, None], steps(x)].sum(1),
    "merged": lambda m, x, mask: m.dropout(m.linear(x.reshape(-1, WIDTH))).view_as(x).relu_(),
    "gathered": lambda m, x, mask: (x + 1).gather(1, mask[:, :, None].expand(-1, -1, WIDTH) - mask[:, :, None]),
    "heads": lambda m, x, mask: m.linear(x).unflatten(2, (2, -1)).transpose(1, 2).permute(2, 0, 1, 3)[0],
}


class All(Parts):
    """Every function of both tables, as the entries of one result."""

    def forward(self, x, mask):
        functions = {f"d.{name}": each for name, (each, *_) in DEPENDENT.items()}
        functions |= {f"i.{name}": each for name, each in INDEPENDENT.items()}
        return {name: function(self, x, mask) for name, function in functions.items()}


def example(seed=0, length=5, rows=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, WIDTH, generator=generator), torch.ones(rows, length, dtype=torch.int64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return All().eval()


@pytest.fixture(scope="module")
def reason(model, tmp_path_factory):
    """Return a function from a result's name to why padding may change it."""
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)}
    parts = exported_parts(model, example(), (sizes, sizes), tmp_path_factory.mktemp("padding") / "all")

    def find(name):
        part, inputs, shape, dimension = parts(name, "length")
        axes = [axis for axis, size in enumerate(shape) if dimension.symbol in symbols_of(size)]
        outputs = {0: axes[0] if axes else None}
        return dependence_on_padding(part, dimension.symbol, dict.fromkeys(inputs, 1), outputs)

    return find


def is_same(function, model, seed):
    """Return whether a call that is padded with zeros has the results that it has alone."""
    x, mask = example(seed)
    with torch.no_grad():
        alone = function(model, x, mask)
        padded = function(model, *(torch.cat([each, each[:, :3] * 0], 1) for each in (x, mask)))
    cut = padded[tuple(slice(size) for size in alone.shape)]
    return torch.allclose(cut, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DEPENDENT)
def test_results_that_padding_changes_are_told_by_operator_line_and_axis(name, model, reason):
    function, operator, text = DEPENDENT[name]
    found = reason(f"d.{name}")
    assert found is not None
    assert f"`aten::{operator}` (tests/unit/runtime/test_padding.py:" in found
    assert text in found
    assert not all(is_same(function, model, seed) for seed in range(3))


@pytest.mark.parametrize("name", INDEPENDENT)
def test_results_that_padding_is_said_not_to_change_are_the_same(name, model, reason):
    assert reason(f"i.{name}") is None
    assert all(is_same(INDEPENDENT[name], model, seed) for seed in range(3))
