"""Operators that trust their arguments: calls that would leave their memory are refused, others run as in torch."""

import math
from pathlib import Path

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
LSTM = (0.0, False, False, False)
GRID = torch.zeros(1, 4, 4, 2)
BATCHES = torch.ones(3, 2, 4, 4).transpose(0, 1)
NORM = (channels(2), channels(2), channels(2), channels(2))
CTC_BACKWARD = (torch.ones(2), LOGS, torch.ones(2, 2).long(), [5, 5], [2, 2], torch.ones(2), torch.ones(2, 5, 5))
BYTES = torch.ones(3, 4, dtype=torch.int8)
GROUPS = (torch.ones(6, 8).bfloat16(), torch.ones(2, 8, 16).bfloat16())

REFUSED = [
    (name, eval(args), reason)
    for name, reason, args in (
        row.split("\t") for row in Path(__file__).with_name("refused_calls.tsv").read_text().splitlines()
    )
]
"""Operators, calls of them as expressions of this file, and why they are refused."""
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
