"""Attention in lowered graphs: the operators of GPUs, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from aotexport_runtime.values.sizes import evaluate, symbols_of
from tests.cuda.lowered import lowered, operators


class Attention(nn.Module):
    def __init__(self, dtype=torch.float32, width=8, groups=2, **options):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, heads * width, dtype=dtype) for heads in (2, groups, groups))
        self.width, self.options = width, {"enable_gqa": groups != 2, **options}
        self.bias = nn.Parameter(torch.zeros(2, 6, 6, dtype=dtype)) if options.pop("learned", False) else None
        self.options.pop("learned", None)

    def forward(self, x, mask=None):
        heads = (project(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for project in self.projections)
        mask = self.bias if mask is None else mask
        return functional.scaled_dot_product_attention(*heads, mask, **self.options).transpose(1, 2).flatten(2)


def attention_of(program):
    """Return what computes attention, forward then backward."""
    return [
        op.removeprefix("aten::_scaled_dot_product_").removesuffix(".default")
        for file in program.graphs
        for op in operators(program, file)
        if op.startswith("aten::_scaled")
    ]


EFFICIENT = ["efficient_attention", "efficient_attention_backward"]
FLASH = ["flash_attention", "flash_attention_backward"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Attention(), EFFICIENT),
        (Attention(is_causal=True, width=7), EFFICIENT),
        (Attention(dropout_p=0.1), EFFICIENT),
        (Attention(learned=True), EFFICIENT),
        (Attention(groups=1), EFFICIENT),
        (Attention(torch.bfloat16, is_causal=True), FLASH),
        (Attention(torch.float16, dropout_p=0.1, width=5), FLASH),
        (Attention(torch.bfloat16, learned=True), EFFICIENT),
        (Attention(torch.float64), []),
    ],
    ids=["plain", "odd_head", "dropout", "learned_mask", "groups", "half", "half_dropout", "half_mask", "double"],
)
def test_attention_is_the_fused_operators_of_gpus(module, expected):
    x = torch.randn(2, 6, 16, dtype=module.projections[0].weight.dtype)
    program = lowered(module, x, program="train")
    assert attention_of(program) == expected
    assert not any("_for_cpu" in op for file in program.graphs for op in operators(program, file))


def test_seeds_of_dropout_are_saved_for_the_backward():
    program = lowered(Attention(dropout_p=0.1), torch.randn(2, 6, 16), program="train")
    seeds = [value for value in program.graphs["backward.json"].inputs if value.meta.shape == ()]
    assert [value.meta.dtype for value in seeds] == ["int64", "int64"]


def test_mask_of_dynamic_length_holds_the_program_to_no_length():
    sequence = torch.export.Dim("sequence", min=2, max=64)
    shapes = ({1: sequence}, {0: sequence, 1: sequence})
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    program = lowered(Attention(), torch.randn(2, 6, 16), mask, program="train", dynamic_shapes=shapes)
    assert attention_of(program) == EFFICIENT
    for length in range(2, 65):
        symbols = dict.fromkeys((symbol for guard in program.record.guards for symbol in symbols_of(guard)), length)
        assert all(evaluate(guard, symbols) for guard in program.record.guards)


def test_attention_over_the_first_axis_is_fused():
    attention = nn.MultiheadAttention(8, 2)
    program = lowered(lambda x: attention(x, x, x, need_weights=False)[0], torch.randn(5, 2, 8))
    assert attention_of(program) == ["efficient_attention"]
