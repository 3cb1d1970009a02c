"""Operators that trust their arguments: calls that would leave their memory are refused, others run as in torch."""

import math

import pytest
import torch
from torch import ones
from torch.nn import functional

from aotexport_runtime import CheckFailed
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.preconditions.table import PRECONDITIONS, WRITTEN

ATEN = torch.ops.aten
LEAST = -(2**63)


def call(name, *args, **kwargs):
    return ops.resolve(f"aten::{name}", None, frozenset())(*args, **kwargs)


def channels(count, like=None):
    return torch.ones(count)


IMAGES = torch.arange(32.0).reshape(1, 2, 4, 4)
POOLED, PLACES = ATEN.max_pool2d_with_indices.default(IMAGES, [2, 2], [2, 2])
VOLUMES = torch.arange(16.0).reshape(1, 2, 2, 2, 2)
LU, PIVOTS = torch.linalg.lu_factor(torch.eye(3) + torch.ones(3, 3))
LOGS = torch.randn(5, 2, 4).log_softmax(2)
ROWS = torch.randn(4, 3)
WEIGHT, INDICES, OFFSETS = torch.randn(6, 3), torch.tensor([0, 5, 2]), torch.tensor([0, 2])
BAGS = ATEN._embedding_bag.default(WEIGHT, INDICES, OFFSETS)
HEADS = torch.ones(1, 2, 4, 8)
GRID_AXES = "`grid` must have as many axes as `input`, four or more"
LSTM = (0.0, False, False, False)
GRID = torch.zeros(1, 4, 4, 2)
PADDING = "`padding` must be smaller than the image"
BATCHES = torch.ones(3, 2, 4, 4).transpose(0, 1)
NORM = (channels(2), channels(2), channels(2), channels(2))
CTC_BACKWARD = (torch.ones(2), LOGS, torch.ones(2, 2).long(), [5, 5], [2, 2], torch.ones(2), torch.ones(2, 5, 5))
BYTES = torch.ones(3, 4, dtype=torch.int8)
GROUPS = (torch.ones(6, 8).bfloat16(), torch.ones(2, 8, 16).bfloat16())

LISTS = "all lists must be of one length, and not empty"

REFUSED = [
    ("_ctc_loss", (LOGS, torch.tensor([1, 2]), [5, 5], [2, 2]), "`target_lengths` must add up to the targets"),
    ("_ctc_loss", (LOGS, ones(2, 2).long(), [6, 5], [2, 2]), "`input_lengths` must be from 0 to below 6"),
    ("_ctc_loss", (LOGS, ones(2, 2).long(), [5, 5], [3, 2]), "`target_lengths` must be from 0 to below"),
    (
        "_ctc_loss_backward",
        (ones(2), LOGS, ones(2, 2).long(), [5, 5], [2, 2], ones(2), ones(2, 5, 3), 0),
        "`target_lengths` must be from 0 to below 2",
    ),
    ("_fft_r2c", (ones(4), [1 << 40], 0, True), "`dim` must be axes from 0 to below 1"),
    ("_fft_c2r", (ones(4) + 0j, [0], 0, 64), "axis 0 is too short for `last_dim_size`"),
    ("_fft_c2c", (ones(4, 4) + 0j, [1, 1], 0, True), "`dim` must name each axis once"),
    (
        "native_batch_norm_backward",
        (IMAGES, IMAGES, *NORM[:3], channels(1), channels(2), True, 1e-5, [True] * 3),
        "`save_mean` must have the sizes (2,), not (1,)",
    ),
    ("lcm", (torch.tensor([LEAST]), torch.tensor([5])), "`self` must not hold the least number of its dtype"),
    ("div.Tensor_mode", (torch.tensor([LEAST]), torch.tensor([-1])), "the least number of a dtype cannot be divided"),
    ("lu_unpack.out", (BATCHES, ones(2, 3, 4, dtype=torch.int32)), "`L` must be contiguous"),
    ("linalg_matrix_power", (torch.eye(2), -(1 << 63)), "`n` must not be the least integer"),
    ("lu_unpack", (LU, torch.tensor([1000, 2, 3], dtype=torch.int32)), "pivots must be from 1 to below 4"),
    ("embedding_bag", (WEIGHT, INDICES.reshape(1, 3), OFFSETS), "`indices` must have one axis"),
    ("_embedding_bag", (WEIGHT, INDICES, OFFSETS.bool()), "`offsets` must be of dtype int32 or int64"),
    ("_embedding_bag", (WEIGHT, INDICES + 6, OFFSETS), "`indices` must be from 0 to below 6"),
    ("_embedding_bag", (WEIGHT, INDICES, OFFSETS[:0]), "`offsets` must not be empty"),
    ("_embedding_bag", (WEIGHT, INDICES, OFFSETS, False, 3), "`mode` must be from 0 to 2"),
    ("grid_sampler_2d", (IMAGES, GRID, -2, 0, False), "`interpolation_mode` must be from 0 to 2"),
    ("grid_sampler_3d", (IMAGES, GRID[0], 0, 0, False), GRID_AXES),
    ("grid_sampler_2d_backward", (IMAGES[..., :1], IMAGES, GRID, 0, 0, False, [True] * 2), "`grad_output` must have"),
    (
        "native_batch_norm_backward",
        (IMAGES, IMAGES, None, None, None, channels(2), None, True, 1e-5, [True] * 3),
        "what the forward kernel saved must be given",
    ),
    ("_adaptive_avg_pool2d_backward", (IMAGES, IMAGES[..., :0]), "`self` must not be empty"),
    (
        "_embedding_bag_dense_backward",
        (ones(2, 3), INDICES, torch.tensor([0, 0, 9]), *BAGS[2:], 6, False, 0, None),
        "`offset2bag` must be from 0 to below 2",
    ),
    ("_weight_norm", (ROWS, ones(1, 1)), "`g` must be 4 numbers"),
    ("native_group_norm", (ROWS, ones(3), ones(3), 0, 3, 1, 1, 1e-5), "`input` must have `N * C"),
    ("_weight_norm_interface_backward", (ROWS, ROWS, ones(4, 1), ones(1), 0), "`saved_norms` must be 4 numbers"),
    ("_pdist_forward", (ones(3),), "`self` must have two axes"),
    ("_pdist_backward", (ones(1), ROWS, 2.0, ones(6)), "`grad` must have the sizes (6,), not (1,)"),
    (
        "max_pool2d_with_indices_backward",
        (POOLED, IMAGES, [2, 2], [2, 2], [0, 0], [1, 1], False, PLACES + 16),
        "`indices` must be from 0 to below 16",
    ),
    ("_adaptive_avg_pool2d_backward", (ones(1, 3, 2, 2), IMAGES), "`grad_output` must have the sizes"),
    ("_batch_norm_no_update", (IMAGES, None, None, None, channels(2), 0.1, 1e-5), "`running_mean` and"),
    (
        "native_batch_norm",
        (IMAGES, None, None, channels(2), ones(1).expand(2), False, 0.1, 1e-5),
        "`running_var` must be contiguous",
    ),
    ("_native_batch_norm_legit.no_stats", (IMAGES, None, None, False, 0.1, 1e-5), "without running statistics"),
    (
        "native_group_norm_backward",
        (IMAGES, IMAGES, ones(1, 3), ones(1, 3), channels(2), 1, 2, 16, 3, [True] * 3),
        "`C` must be a multiple of `group`",
    ),
    (
        "native_layer_norm_backward",
        (ones(0), ROWS, [3], ones(4, 1), ones(4, 1), None, None, [True] * 3),
        "`grad_out` must have the sizes (4, 3), not (0,)",
    ),
    (
        "native_layer_norm_backward",
        (ROWS, ROWS, [3], ones(1, 1), ones(4, 1), None, None, [True] * 3),
        "`mean` must be 4 numbers",
    ),
    ("_scaled_dot_product_flash_attention_for_cpu", (HEADS, HEADS[:, :, :1], HEADS), "`value` must have the"),
    (
        "lstm.input",
        (ones(3, 1, 2), [ones(1, 1, 2), ones(1, 5, 2)], [ones(8, 2)] * 2, False, 1, *LSTM),
        "`hx` must be of a batch of 1",
    ),
    ("random.from", (ROWS, (1 << 63) - 1, None), "`from` must be from -16777216 to 16777216"),
    ("_chunk_cat", ([torch.tensor(1.0)], 0, 1), "every tensor must have axis `dim`"),
    ("_foreach_copy", ([ROWS], [ROWS, ROWS]), LISTS),
    (
        "nll_loss_backward",
        (ones(4), ROWS, torch.tensor([0, 3, -100, 1]), None, 0, -100, torch.tensor(3.0)),
        "`target`, but for `ignore_index`, must be from 0 to below 3",
    ),
    ("matrix_exp_backward", (ones(()), ones(())), "`self` and `grad` must have two axes or more"),
    ("native_channel_shuffle", (IMAGES, 5), "`groups` must divide the channels"),
    ("pdist", (ones(0, 3).requires_grad_(),), "`self` must have rows"),
    ("_pdist_forward", (ones(0, 3).requires_grad_(),), "`self` must have rows"),
    (
        "embedding_bag.padding_idx",
        (ones(6, 3).requires_grad_(), INDICES, OFFSETS, False, 0, False, None, True, None),
        "with gradients the last of `offsets` must be the end",
    ),
    (
        "_grouped_mm",
        (ones(6, 8).bfloat16().requires_grad_(), GROUPS[1], torch.tensor([2, 5], dtype=torch.int32)),
        "with gradients `offs` must end at 6",
    ),
    ("_linalg_eigvals", (torch.full((2, 2), math.nan),), "`self` must be finite"),
    ("_scaled_dot_product_attention_math", (HEADS, HEADS[:, :0], HEADS[:, :0]), "the heads of `query` must"),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        (HEADS, HEADS, HEADS[:, :, :0], HEADS[:, :, :0], HEADS, ones(1, 2, 4), 0.0, False),
        "`query` and `key` must have heads, steps and an embedding",
    ),
    (
        "lstm.input",
        (ones(3, 1, 2), [ones(1, 1, 2)] * 2, [ROWS], True, 1, 0.0, False, False, False),
        "`params` must be 4 tensors",
    ),
    (
        "lstm.input",
        (ones(3, 1, 2), [ones(1, 1, 2)] * 2, [ones(8, 2), ones(0, 2)], False, 1, *LSTM),
        "a tensor of `params` must have the sizes (8, 2), not (0, 2)",
    ),
    (
        "rnn_tanh.data",
        (ROWS, torch.tensor([3, 3]), ones(1, 3, 3), [ones(3, 3)] * 2, False, 1, 0.0, False, False),
        "`batch_sizes` must add up to the rows of `data`",
    ),
    ("_pad_packed_sequence", (ROWS, torch.tensor([2, 3]), False, 0.0, 0), "`batch_sizes` must not rise"),
    ("embedding_dense_backward", (ROWS[:3], INDICES, 5, -1, False), "`indices` must be from 0 to below 5"),
    ("reflection_pad2d_backward", (ones(1, 2, 5, 6), IMAGES, [1, 1, 1, 1]), "`grad_output` must have"),
    ("reflection_pad1d_backward", (ones(2, 9), ones(2, 3), [3, 3]), PADDING),
    ("replication_pad1d_backward", (ones(2, 3), ones(2, 0), [1, 2]), "`self` must not be empty"),
    ("range.step", (0, 5, 0.5), "`step` must not be 0 as an integer"),
    ("smooth_l1_loss_backward", (INDICES, INDICES, INDICES, 0, 0.0), "`self` must be of a floating dtype"),
    ("multilabel_margin_loss", (ones(0, 2), ones(0, 2).long()), "`self` must not be empty"),
    ("l1_loss", (ROWS, ROWS, 3), "`reduction` must be 0, 1 or 2"),
    ("binary_cross_entropy_backward", (ones(1), ones(1), ones(0)), "`target` must have the"),
    ("_cdist_backward", (ones(4, 2), ROWS, ROWS[:3], 2.0, ones(4, 3)), "`grad` must have the"),
    ("linalg__powsum", (ROWS + 0j, 2, [1]), "`dtype` must be complex as `self` is"),
    ("set_.source_Tensor", (ones(3).double(), ROWS), "`source` must be of the dtype of `self`"),
    ("set_.source_Tensor_storage_offset", (ones(3), ones(3), 2, [2], [1]), "the tensor must lie in the"),
    ("tril.out", (BATCHES,), "`out` must be contiguous"),
    ("as_strided_", (ROWS, [7, 64], [4, 2**63 - 1]), "`size` and `stride` must lie in the memory of `self`"),
    ("binary_cross_entropy_backward", (ones(4, 0), ones(1), ones(1)), "`grad_output` must"),
    ("binomial", (torch.tensor([torch.nan]), ones(1)), "`count` must not be NaN"),
    (
        "fractional_max_pool3d_backward",
        (ones(0, 0, 3, 2), ones(0, 0, 3, 2), [], [], ones(0, 0, 3, 2).long()),
        "`output_size` must be 3 numbers",
    ),
    ("rrelu_with_noise.out", (ones(3), ones(3)), "`out` must have the sizes (3,), not ()"),
    ("tensor_split.sections", (ROWS, 1 << 20), "`sections` must be at most 100000"),
    ("unfold_backward", (ones(1, 1, 2), [3, 5], 1, 2, 1), "`grad_in` must have the sizes (1, 4, 2),"),
    ("special_laguerre_polynomial_l.n_scalar", (ROWS, 10**9), "`n` must be at most 100000"),
    ("_ctc_loss_backward", (*CTC_BACKWARD, -1), "`blank` must be from 0 to below 4"),
    ("_fft_c2r", (ones(9) + 0j, [0], 0, 5), "axis 0 is longer than `last_dim_size`"),
    ("embedding_bag", (WEIGHT, INDICES, torch.tensor([0]).expand(2)), "`offsets` must be contiguous"),
    (
        "_embedding_bag_per_sample_weights_backward",
        (ROWS[:1], WEIGHT, INDICES, OFFSETS, INDICES[:0], 0),
        "`grad` must have a row per bag",
    ),
    (
        "_embedding_bag_dense_backward",
        (ROWS[:2], INDICES, torch.tensor([0, 0, 1]), INDICES[:0], INDICES[:0], 6, False, 1, None),
        "`bag_size` must be a number per bag",
    ),
    (
        "_embedding_bag_dense_backward",
        (ROWS[:2], INDICES, torch.tensor([0, 0, 1]), torch.tensor([1]).expand(2), INDICES[:0], 6, False, 1, None),
        "`bag_size` must be contiguous",
    ),
    ("_int_mm", (BYTES[:1].expand(3, 4), BYTES.t()), "elements of `self` must not share memory"),
    ("_grouped_mm", (*GROUPS, torch.tensor([2, 7], dtype=torch.int32)), "`offs` must be from 0 to below 7"),
    ("_grouped_mm", (*GROUPS, torch.tensor([3, 2], dtype=torch.int32)), "`offs` must not fall"),
    ("_weight_norm_interface", (ROWS[:1].expand(4, 3), ones(4, 1)), "`v` must be contiguous"),
    ("_softmax_backward_data.out", (ROWS, ROWS, 1, torch.float32), "elements of `grad_input` must not share memory"),
    ("_pdist_backward", (ROWS[:0, 0], ROWS[:0], 2.0, ROWS[:0, 0]), "`self` must have rows"),
    ("_scaled_dot_product_flash_attention_for_cpu", (HEADS.mT.contiguous().mT, HEADS, HEADS), "the numbers of a step"),
    ("avg_pool2d_backward", (POOLED, IMAGES[:0], [2, 2], [2, 2], [0, 0], False, True, None), "`grad_output` must"),
    ("adaptive_max_pool2d", (IMAGES, [1 << 40, 0]), "`output_size` must be at most 100000 beside 0"),
    ("gelu_backward", (ROWS[0], ROWS), "`grad_output` must have the sizes (4, 3), not (3,)"),
    ("gru_cell", (ROWS, ROWS, ROWS, ones(9, 3)), "`w_ih` must have 9 rows"),
    ("max_unpool2d", (POOLED, PLACES, [4]), "`output_size` must be 2 numbers"),
    ("pixel_shuffle", (IMAGES, 1 << 40), "`upscale_factor` must be from 1 to below 2147483648"),
    ("reflection_pad3d", (IMAGES, []), "`padding` must be 6 numbers"),
    ("combinations", (ROWS[0], 1 << 40), "`r` must be at most 100000"),
    ("im2col", (IMAGES, [2, 2], [1 << 62, 1], [0, 0], [1, 1]), "`dilation` must be below 2147483648"),
    ("fractional_max_pool3d", (VOLUMES, [1, LEAST, 1], [2, 2, 2], torch.rand(1, 2, 3)), "`kernel_size` must"),
    ("linalg_ldl_solve", (torch.eye(3), torch.tensor([-1, 1, 1], dtype=torch.int32), torch.eye(3)), "negative pivots"),
    ("multi_margin_loss_backward", (ones(2), ROWS, torch.zeros(4).long(), 1, 1.0, None, 0), "`grad_output` must be 4"),
    ("repeat_interleave.Tensor", (torch.tensor([4, -3]),), "`repeats` must be from 0 to below 2147483648"),
    ("scaled_dot_product_attention", (HEADS, HEADS, HEADS[:, :, :2]), "`key` and `value` must have as many"),
    ("median.dim", (ones(1).expand(2), 0), "elements of `self` along `dim` must not share memory"),
    ("native_group_norm", (IMAGES, ones(1).expand(2), None, 1, 2, 16, 2, 1e-5), "elements of `weight`"),
    (
        "native_layer_norm_backward",
        (ROWS, ROWS, [3], ones(4, 1), ones(1, 1).expand(4, 1), None, None, [True] * 3),
        "elements of `rstd` must not share memory",
    ),
    ("multilabel_margin_loss_backward", (ROWS[:0], ROWS, ROWS.long(), 1, ROWS), "`grad_output` must not be"),
    ("rrelu_with_noise", (ROWS, ones(1).expand(4, 3), 0.1, 0.3, True), "elements of `noise` must not"),
]

KEYWORDS = {
    "div.Tensor_mode": {"rounding_mode": "trunc"},
    "range.step": {"dtype": torch.int64},
    "linalg__powsum": {"dtype": torch.bfloat16},
    "lu_unpack.out": {"P": ones(2, 3, 4, 4), "L": BATCHES, "U": BATCHES},
    "tril.out": {"out": BATCHES},
    "_softmax_backward_data.out": {"grad_input": ones(3).expand(4, 3)},
    "rrelu_with_noise.out": {"out": ones(())},
    "_scaled_dot_product_attention_math": {"enable_gqa": True},
}


@pytest.mark.parametrize(("name", "args", "reason"), REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED)])
def test_call_that_would_leave_its_memory_is_refused(name, args, reason):
    operator = name if "." in name else f"{name}.default"
    with pytest.raises(CheckFailed) as caught:
        call(operator, *args, **KEYWORDS.get(name, {}))
    assert str(caught.value).startswith(f"operator `aten::{operator}`: {reason}")


def test_every_precondition_has_a_refused_call():
    refused = {row[0] for row in REFUSED} | {row[0].partition(".")[0] for row in REFUSED}
    checked = {check for name, check in PRECONDITIONS.items() if name in refused}
    assert [name for name, check in PRECONDITIONS.items() if check not in checked] == []


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("empty.memory_format", ([3, 1000],)),
        ("empty_like.default", (torch.ones(3, 1000),)),
        ("empty_permuted.default", ([3, 1000], [1, 0])),
        ("empty_strided.default", ([3, 1000], [1, 3])),
        ("new_empty.default", (ROWS, [3, 1000])),
        ("new_empty_strided.default", (ROWS, [3, 1000], [1000, 1])),
    ],
)
def test_memory_that_nobody_has_written_is_zero(name, args):
    for _ in range(3):
        torch.full((3, 1000), 7.0)
        assert not call(name, *args).any()


def test_integers_that_backward_trusts_are_out_of_reach_where_autograd_records():
    image = IMAGES.clone().requires_grad_()
    pooled, places = call("max_pool2d_with_indices.default", image, [2, 2])
    places.fill_(1 << 40)
    (found,) = torch.autograd.grad(pooled.sum(), image)
    assert found.sum() == pooled.numel()
    targets = torch.tensor([[1, 2], [1, 2]])
    loss, _ = call("_ctc_loss.default", LOGS.clone().requires_grad_(), targets, [5, 5], [2, 2])
    assert loss.grad_fn._saved_targets.data_ptr() != targets.data_ptr()


@pytest.mark.parametrize(
    ("name", "args"), [("resize_.default", ([3000],)), ("resize_as_.default", (torch.ones(3000),))]
)
def test_memory_that_a_tensor_gains_is_zero_and_its_own_stays(name, args):
    for _ in range(3):
        torch.full((3000,), 7.0)
        tensor = torch.tensor([1.0, 2.0])
        assert call(name, tensor, *args) is tensor
        assert tensor[:2].tolist() == [1.0, 2.0]
        assert not tensor[2:].any()


def test_table_of_the_ctc_loss_is_written_where_the_kernel_does_not():
    targets = torch.tensor([[1, 2], [3, 0]])
    _, table = call("_ctc_loss.default", LOGS, targets, [5, 3], [2, 1])
    assert table.shape == (2, 5, 5)
    assert (table[1, 3:] == -math.inf).all()
    assert (table[1, :, 3:] == -math.inf).all()
    assert torch.equal(table[0], ATEN._ctc_loss.default(LOGS, targets, [5, 3], [2, 1])[1][0])


@pytest.mark.parametrize(
    ("operands", "beyond"),
    [(GROUPS, (slice(5, 6), ...)), ((GROUPS[1].mT, torch.ones(8, 8).bfloat16()), (..., slice(5, 8)))],
    ids=["rows", "columns"],
)
def test_rows_and_columns_of_no_group_are_zero(operands, beyond):
    ends = torch.tensor([3, 5], dtype=torch.int32)
    result = call("_grouped_mm.default", *operands, ends)
    assert not result[beyond].any()
    result[beyond] = 8
    assert (result == 8).all()


def backward(function, *inputs):
    """Return the gradients of a function's sum, computed with operators that the runtime resolves."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    function(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves]


def test_call_that_fits_gives_what_torch_gives():
    grad = torch.ones_like(POOLED)
    pooled = call(
        "max_pool2d_with_indices_backward.default", grad, IMAGES, [2, 2], [2, 2], [0, 0], [1, 1], False, PLACES
    )
    assert torch.equal(pooled, *backward(lambda x: functional.max_pool2d(x, 2), IMAGES))
    targets = torch.tensor([[1, 2, -100], [3, -100, -100]])
    expected = ATEN.ctc_loss.IntList(LOGS, targets, [5, 4], [2, 1])
    assert torch.equal(call("ctc_loss.IntList", LOGS, targets, [5, 4], [2, 1]), expected)
    assert torch.equal(call("ctc_loss.Tensor", LOGS, targets, torch.tensor([5, 4]), torch.tensor([2, 1])), expected)
    padded = call("replication_pad1d_backward.default", torch.ones(2, 9), torch.ones(2, 3), [3, 3])
    assert torch.equal(padded, torch.tensor([[4.0, 1.0, 4.0]] * 2))
    joined = torch.tensor([1, 2, 3])
    assert torch.equal(
        call("_ctc_loss.default", LOGS, joined, [5, 4], [2, 1])[0],
        ATEN._ctc_loss.default(LOGS, targets, [5, 4], [2, 1])[0],
    )
    assert torch.equal(call("_embedding_bag.default", WEIGHT, INDICES, OFFSETS)[0], BAGS[0])
    assert torch.equal(call("lu_unpack.default", LU, PIVOTS)[1], ATEN.lu_unpack.default(LU, PIVOTS)[1])
    assert torch.equal(call("_fft_r2c.default", torch.ones(4), [0], 0, True), torch.fft.rfft(torch.ones(4)))
    assert torch.equal(call("_pdist_forward.default", ROWS), functional.pdist(ROWS))
    numbers = torch.tensor([LEAST, 7, -7])
    assert call("div.Tensor_mode", numbers, torch.tensor([2, -2, -1]), rounding_mode="trunc").tolist() == [
        LEAST // 2,
        -3,
        7,
    ]
    assert call("div.Tensor_mode", 7, torch.tensor([2, -1]), rounding_mode="trunc").tolist() == [3, -7]
    assert call("div.Scalar_mode", numbers, 2, rounding_mode="trunc").tolist() == [LEAST // 2, 3, -3]
    assert call("div.Tensor_mode", 7, -2, rounding_mode="trunc").item() == -3
    trained = call(
        "native_batch_norm.default", IMAGES, *NORM[:2], *(value.clone() for value in NORM[2:]), True, 0.1, 1e-5
    )
    assert torch.equal(trained[0], functional.batch_norm(IMAGES, None, None, *NORM[:2], training=True))


@pytest.mark.parametrize("name", [name for name in WRITTEN if name.startswith("special_")])
def test_polynomials_of_nan_are_nan(name):
    x, n = torch.tensor([math.nan, 0.5]), torch.tensor([3, 3])
    for found in (call(f"{name}.default", x, n), call(f"{name}.n_scalar", x, 3), call(f"{name}.x_scalar", math.nan, n)):
        assert found[0].isnan()
    assert call(f"{name}.default", x, n)[1] == getattr(ATEN, name).default(x, n)[1]


def test_solution_by_blocks_of_a_symmetric_factorization_is_that_of_torch():
    matrix = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
    factors, pivots = torch.linalg.ldl_factor(matrix)
    assert (pivots < 0).any()
    torch.testing.assert_close(call("linalg_ldl_solve.default", factors, pivots, torch.eye(3)) @ matrix, torch.eye(3))


def test_functions_that_engines_call_directly_need_no_precondition():
    kernels = {name: ops.overload(name, None, frozenset()) for name in ops._PLAIN}
    assert kernels
    assert [name for name, kernel in kernels.items() if ops.resolve(name, None, frozenset()) is not kernel] == []


def test_call_of_a_trace_is_left_alone():
    with torch.device("meta"):
        images, places = torch.empty(1, 2, 4, 4), torch.empty(1, 2, 2, 2, dtype=torch.int64)
    args = (images[..., :2, :2], images, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
    assert call("max_pool2d_with_indices_backward.default", *args).shape == images.shape


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"groups": 0}, "`groups` must be at least 1"), ({"stride": (1 << 40,)}, "`stride` must be below 2147483648")],
)
def test_convolution_that_divides_by_zero_in_torch_2_7_is_refused(changed, message):
    ordinary = {**dict.fromkeys(("stride", "padding", "dilation", "output_padding"), (1,)), "groups": 1}
    PRECONDITIONS["im2col"](ordinary)
    with pytest.raises(CheckFailed, match=message):
        PRECONDITIONS["im2col"](ordinary | changed)


def test_integers_that_autograd_saves_below_vmap_are_out_of_reach():
    def pooled(images, *, is_written):
        result, places = call("max_pool2d_with_indices.default", images, [2, 2], [2, 2])
        if is_written:
            call("fill_.Scalar", call("_unsafe_view.default", places, [*places.shape]), 0)
        return result

    images = torch.randn(3, 1, 2, 4, 4, requires_grad=True)
    plain, written = (
        torch.autograd.grad(torch.vmap(lambda x, w=w: pooled(x, is_written=w))(images).sum(), images)[0]
        for w in (False, True)
    )

    assert torch.equal(plain, written)
