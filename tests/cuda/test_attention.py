"""Attention in lowered graphs: the operators of GPUs, forward and backward."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from aotexport.lower.cuda.attention import MOVED, bias, fitted, fused_kind
from aotexport.lower.cuda.retarget import CannotLower
from aotexport_runtime.validate.arguments import metas_of
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
    """Return what computes attention, forward then backward: nothing that is for CPUs alone."""
    assert not any("_for_cpu" in op for file in program.graphs for op in operators(program, file))
    for graph in program.graphs.values():
        metas, found = metas_of(graph), [node for node in graph.nodes if node.op.startswith("aten::_scaled_dot")]
        assert all(metas[each.args[1]].shape[1] == metas[each.args[2]].shape[1] for each in found)
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
        (Attention(learned=True), EFFICIENT),
        (Attention(groups=1), EFFICIENT),
        (Attention(torch.bfloat16, is_causal=True), FLASH),
    ],
    ids=["learned_mask", "groups", "half"],
)
def test_attention_is_the_fused_operators_of_gpus(module, expected):
    x = torch.randn(2, 6, 16, dtype=module.projections[0].weight.dtype)
    program = lowered(module, x, program="train")
    assert attention_of(program) == expected


def test_seeds_of_dropout_are_saved_for_the_backward():
    program = lowered(Attention(is_causal=True, width=7, dropout_p=0.1), torch.randn(2, 6, 16), program="train")
    assert attention_of(program) == EFFICIENT
    seeds = [value for value in program.graphs["backward.json"].inputs if value.meta.shape == ()]
    assert [value.meta.dtype for value in seeds] == ["int64", "int64"]


def test_mask_of_dynamic_length_holds_the_program_to_no_length():
    sequence = torch.export.Dim("sequence", min=2, max=64)
    shapes = ({1: sequence}, {2: sequence, 3: sequence})
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    program = lowered(Attention(), torch.randn(2, 6, 16), mask, program="train", dynamic_shapes=shapes)
    assert attention_of(program) == EFFICIENT
    for length in range(2, 65):
        symbols = dict.fromkeys((symbol for guard in program.record.guards for symbol in symbols_of(guard)), length)
        assert all(evaluate(guard, symbols) for guard in program.record.guards)


def test_attention_over_the_first_axis_is_fused():
    attention = nn.MultiheadAttention(8, 2)
    program = lowered(lambda x: attention(x, x, x, need_weights=False)[0], torch.randn(5, 2, 8))
    assert attention_of(program) == ["efficient_attention"]


# --- operators of CPUs by those of GPUs ----------------------------------------------------------------------

aten = torch.ops.aten

FOR_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu.default"
FOR_CPU_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default"


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    results = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return *results, None, None, query.shape[2], key.shape[2], state, state[0], query.new_empty(0)


def flash_backward(grad, query, key, value, out, statistics, *rest, scale=None):
    operands = grad, query, key, value, out, statistics, 0.0, rest[5]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, scale=scale)


def efficient(query, key, value, mask, statistics, dropout_p=0.0, is_causal=False, *, scale=None):
    options, seed = {"attn_mask": mask, "scale": scale}, torch.zeros((), dtype=torch.int64)
    results = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, **options)
    return *results, seed, seed


def efficient_backward(grad, query, key, value, mask, out, statistics, *rest, is_causal=False, scale=None):
    operands = grad, query, key, value, out, statistics, 0.0, len(rest) > 4 and rest[4]
    options = {"attn_mask": mask, "scale": scale}
    return *aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, **options), None


def test_attention_in_float64_has_no_kernels():
    with pytest.raises(CannotLower, match=r"^GPUs have nothing like .*flash_attention_for_cpu.* for its dtypes"):
        lowered(Attention(torch.float64), torch.randn(2, 6, 16, dtype=torch.float64))


@pytest.fixture
def cuda_operators():
    """Give CPUs the operators that CUDA devices have."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for kind, functions in {"flash": (flash, flash_backward), "efficient": (efficient, efficient_backward)}.items():
            for direction, function in zip(("", "_backward"), functions, strict=True):
                library.impl(f"_scaled_dot_product_{kind}_attention{direction}", function, "CPU")
        yield


def operands(dtype=torch.float32, width=8, rows=5, columns=5, batch=2, heads=3):
    torch.manual_seed(0)
    query = torch.randn(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
    return query, *(torch.randn(batch, heads, columns, width, dtype=dtype) for _ in range(2))


def boolean(query, key):
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)


def added(query, key):
    return torch.randn(query.shape[0], 1, query.shape[2], key.shape[2], dtype=query.dtype)


def nothing_at_first(query, key):
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(-1)


def shared(tensors):
    return tensors[0], tensors[1][:, :2], tensors[2][:, :2]


CALLS = {
    "plain": (operands(), None, False),
    "causal": (operands(), None, True),
    "truths": (operands(columns=9), boolean, False),
    "added": (operands(), added, False),
    "half": (operands(torch.float16), None, True),
    "half_masked": (operands(torch.bfloat16), added, False),
    "half_shared_heads": (shared(operands(torch.float16, heads=4)), None, True),
    "rows_without_keys": (operands(), nothing_at_first, False),
}


@pytest.mark.parametrize(("name", "scale"), [*((name, None) for name in CALLS), ("plain", 0.3), ("half_masked", 0.3)])
def test_operator_of_cpus_on_cuda_computes_the_same(name, scale, cuda_operators):
    (query, key, value), make, is_causal = CALLS[name]
    mask = None if make is None else make(query, key)
    reference = None if mask is None or mask.dtype != torch.bool else mask.new_zeros(mask.shape, dtype=query.dtype)
    reference = mask if reference is None else reference.masked_fill(~mask, -math.inf)
    options = {"scale": scale}
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if query.dtype in (torch.float16, torch.bfloat16) else {}
    out, statistics = MOVED[FOR_CPU](query, key, value, 0.0, is_causal, attn_mask=mask, **options)
    expected = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=reference, **options
    )
    torch.testing.assert_close(out, expected[0], **tolerance)
    grad = torch.randn_like(expected[0])
    gradients = MOVED[FOR_CPU_BACKWARD](
        grad, query, key, value, out, statistics, 0.0, is_causal, attn_mask=mask, **options
    )
    expected = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *expected, 0.0, is_causal, attn_mask=reference, **options
    )
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, **tolerance)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ((*operands(torch.float16), None, True), "flash"),
        ((*operands(torch.bfloat16, width=7), None, False), "flash"),
        ((*operands(torch.float16, columns=9), None, True), "efficient"),
        ((*operands(torch.float16, columns=9), None, False), "flash"),
        ((*operands(torch.float16, width=200), None, False), "efficient"),
        ((*operands(torch.float16), torch.ones(5, 5, dtype=torch.bool), False), "efficient"),
        ((*operands(torch.float16), torch.zeros(5, 5), False), None),
        ((*operands(), None, True), "efficient"),
        ((*operands(torch.float64), None, True), None),
        ((*operands(columns=0), None, False), None),
    ],
)
def test_kernel_is_chosen_as_torch_chooses(call, kind):
    assert fused_kind(*call) == kind


def test_operand_off_the_grid_of_vectors_is_copied():
    wide = torch.randn(2, 3, 5, 9)
    part = wide[..., 1:]
    copy = fitted(part)
    assert copy.stride() == (120, 40, 8, 1)
    assert torch.equal(copy, part)
    assert fitted(copy) is copy


def test_mask_is_expanded_without_memory_and_its_rows_are_aligned():
    query, key, _ = operands(columns=9)
    result = bias(torch.zeros(5, 9), query, key)
    assert result is not None
    assert result.shape == (2, 3, 5, 9)
    assert result.stride() == (0, 0, 16, 1)
