"""Kernels that check nothing: each call passes as autograd makes it, and is refused where it would leave its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotexport_runtime import BundleInvalid, load
from aotexport_runtime.ops import resolve
from aotexport_runtime.preconditions import CHECKS
from tests.hostile.crafted import Crafted

HUGE = 1 << 40


def f(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STATISTICS = (f(3), f(3), f(3), f(3))
MASK = [True, True, True]
BAGS = (i(1, 4, 2, 0), i(0, 3))
LSTM = [f(12, 4), f(12, 3), f(12), f(12)]
GRU = [f(9, 4), f(9, 3), f(9), f(9)]
RNN = [f(3, 4), f(3, 3), f(3), f(3)]
CTC = (f(7, 2, 5).log_softmax(-1), torch.ones(2, 3, dtype=torch.int64), [7, 7], [3, 2])
QUERY = f(2, 4, 3, 8)

Call = tuple[Any, ...]

CALLS: dict[str, tuple[Call, dict[int, Any]]] = {
    # operator: arguments that fit, and by position what does not fit in their place
    "as_strided.default": ((f(6), [2, 3], [3, 1], 0), {1: [2], 2: [-1, 1], 3: (1 << 63) - 1}),
    "as_strided_.default": ((f(6), [2, 3], [3, 1], 0), {1: [2], 3: (1 << 63) - 1}),
    "as_strided_copy.default": ((f(6), [2, 3], [3, 1], 0), {2: [HUGE, HUGE << 20], 3: -1}),
    "as_strided_scatter.default": ((f(6), f(2, 3), [2, 3], [3, 1], 0), {4: (1 << 63) - 1}),
    "set_.source_Tensor_storage_offset": ((f(6), f(6), 0, [2, 3], [3, 1]), {2: (1 << 63) - 1, 3: [-1, 3]}),
    "unfold_backward.default": ((f(1, 2, 10), [1, 12], 1, 10, 2), {0: f(1, 2, 9), 1: [1, 16], 2: 2, 4: 0}),
    "native_batch_norm.default": ((f(2, 3, 4), *STATISTICS, True, 0.1, 1e-5), {1: f(2), 3: f(1), 4: f(4)}),
    "_native_batch_norm_legit.default": ((f(2, 3, 4), *STATISTICS, True, 0.1, 1e-5), {0: f(2), 1: f(2), 4: f(4)}),
    "_native_batch_norm_legit.no_stats": ((f(2, 3, 4), f(3), f(3), True, 0.1, 1e-5), {1: f(2), 3: False}),
    "_native_batch_norm_legit_functional.default": ((f(2, 3, 4), *STATISTICS, True, 0.1, 1e-5), {1: f(2)}),
    "_native_batch_norm_legit_no_training.default": ((f(2, 3, 4), *STATISTICS, 0.1, 1e-5), {1: f(2)}),
    "_batch_norm_no_update.default": ((f(2, 3, 4), *STATISTICS, 0.1, 1e-5), {1: f(2), 3: None}),
    "_batch_norm_with_update.default": ((f(2, 3, 4), *STATISTICS, 0.1, 1e-5), {1: f(2), 3: f(1)}),
    "_batch_norm_with_update_functional.default": ((f(2, 3, 4), *STATISTICS, 0.1, 1e-5), {1: f(2)}),
    "native_batch_norm_backward.default": (
        (f(2, 3, 4), f(2, 3, 4), f(3), f(3), f(3), f(3), f(3), True, 1e-5, MASK),
        {0: f(1, 3, 4), 2: f(2), 5: f(4), 6: None},
    ),
    "batch_norm_backward.default": (
        (f(2, 3, 4), f(2, 3, 4), f(3), f(3), f(3), f(3), f(3), True, 1e-5, MASK, f(0).byte()),
        {0: f(1, 3, 4), 2: f(2), 5: f(4)},
    ),
    "native_layer_norm_backward.default": (
        (f(2, 3, 4), f(2, 3, 4), [4], f(2, 3, 1), f(2, 3, 1), f(4), f(4), MASK),
        {0: f(2, 3), 2: [3], 3: f(1), 4: f(0), 5: f(3)},
    ),
    "_weight_norm.default": ((f(4, 3), f(4, 1), 0), {1: f(3, 1)}),
    "_weight_norm_interface.default": ((f(4, 3), f(4, 1), 0), {0: f(0, 3), 1: f(3, 1), 2: 2}),
    "_weight_norm_interface_backward.default": ((f(4, 3), f(4, 3), f(4, 1), f(4, 1), 0), {0: f(3), 2: f(1), 3: f(0)}),
    "_softmax_backward_data.default": ((f(2, 3), f(2, 3), 1, torch.float32), {0: f(2, 4), 1: f(1)}),
    "_log_softmax_backward_data.default": ((f(2, 3), f(2, 3), 1, torch.float32), {0: f(2, 4), 1: f(1)}),
    "_scaled_dot_product_flash_attention_for_cpu.default": (
        (QUERY, f(2, 2, 6, 8), f(2, 2, 6, 8), 0.0, False),
        {0: f(2, 4, 3, 7), 1: f(2, 3, 6, 8), 2: f(2, 2, 5, 8)},
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": (
        (QUERY, QUERY, f(2, 4, 6, 8), f(2, 4, 6, 8), QUERY, f(2, 4, 3), 0.0, False),
        {0: f(1, 4, 3, 8), 4: f(2, 4, 3, 7), 5: f(1, 4, 3)},
    ),
    "lstm.input": (
        (f(5, 2, 4), [f(1, 2, 3), f(1, 2, 3)], LSTM, True, 1, 0.0, False, False, False),
        {1: [f(1, 2, 3)], 2: [f(12, 4), f(3, 3), f(12), f(12)], 4: 2, 7: True},
    ),
    "lstm.data": (
        (f(7, 4), i(2, 2, 2, 1), [f(1, 2, 3), f(1, 2, 3)], LSTM, True, 1, 0.0, False, False),
        {1: i(2, 2, 2, 2), 2: [f(1, 1, 3), f(1, 1, 3)], 3: LSTM[:3]},
    ),
    "gru.input": ((f(5, 2, 4), f(1, 2, 3), GRU, True, 1, 0.0, False, False, False), {1: f(2, 2, 3), 2: GRU[:2]}),
    "gru.data": ((f(3, 4), i(2, 1), f(1, 2, 3), GRU, True, 1, 0.0, False, False), {1: i(1, 2), 2: f(1, 1, 3)}),
    "rnn_tanh.input": ((f(5, 2, 4), f(1, 2, 3), RNN, True, 1, 0.0, False, False, False), {2: []}),
    "rnn_tanh.data": ((f(3, 4), i(2, 1), f(1, 2, 3), RNN, True, 1, 0.0, False, False), {1: i(3, -1, 1)}),
    "rnn_relu.input": ((f(5, 2, 4), f(1, 2, 3), RNN, True, 1, 0.0, False, False, False), {2: []}),
    "rnn_relu.data": ((f(3, 4), i(2, 1), f(1, 2, 3), RNN, True, 1, 0.0, False, False), {1: f(2)}),
    "_adaptive_avg_pool2d_backward.default": ((f(2, 3, 2, 2), f(2, 3, 5, 5)), {0: f(2, 2, 2, 2), 1: f(0, 3, 5, 5)}),
    "_adaptive_avg_pool3d_backward.default": ((f(3, 2, 2, 2), f(3, 5, 5, 5)), {0: f(2, 2, 2, 2)}),
    "avg_pool2d_backward.default": (
        (f(3, 2, 2), f(3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
        {0: f(1, 2, 2)},
    ),
    "avg_pool3d_backward.default": (
        (f(3, 2, 2, 2), f(3, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, False, True, None),
        {0: f(1, 2, 2, 2)},
    ),
    "adaptive_max_pool2d_backward.default": (
        (f(1, 1, 2), f(1, 3, 3), i(0, 8).reshape(1, 1, 2)),
        {0: f(1, 1, 1), 2: i(0, 9).reshape(1, 1, 2)},
    ),
    "adaptive_max_pool3d_backward.default": (
        (f(1, 1, 1, 2), f(1, 2, 2, 2), i(0, 7).reshape(1, 1, 1, 2)),
        {2: i(0, -1).reshape(1, 1, 1, 2)},
    ),
    "max_pool2d_with_indices_backward.default": (
        (f(1, 1, 2), f(1, 2, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, i(0, 7).reshape(1, 1, 2)),
        {7: i(0, HUGE).reshape(1, 1, 2)},
    ),
    "max_pool3d_with_indices_backward.default": (
        (f(1, 1, 1, 2), f(1, 2, 2, 4), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, i(0, 15).reshape(1, 1, 1, 2)),
        {1: f(2, 2, 2, 4), 7: i(0, -HUGE).reshape(1, 1, 1, 2)},
    ),
    "fractional_max_pool2d_backward.default": (
        (f(1, 1, 2), f(1, 4, 4), [2, 2], [1, 2], i(0, 15).reshape(1, 1, 2)),
        {3: [], 4: i(0, 16).reshape(1, 1, 2)},
    ),
    "fractional_max_pool3d_backward.default": (
        (f(1, 1, 1, 2), f(1, 4, 4, 4), [2] * 3, [1, 1, 2], i(0, 63).reshape(1, 1, 1, 2)),
        {2: [], 4: i(0, 64).reshape(1, 1, 1, 2)},
    ),
    **{
        f"{kind}_pad{rank}d_backward.default": (
            (f(2, 3, *[6] * rank), f(2, 3, *[4] * rank), [1] * 2 * rank),
            {0: f(1, 3, *[6] * rank), 2: [9] * 2 * rank},
        )
        for kind in ("reflection", "replication")
        for rank in (1, 2, 3)
    },
    **{
        f"_upsample_{kind}2d_aa.default": ((f(1, 1, 4, 4), [6, 6], False, 1.5, 1.5), {1: [6, 600], 3: -1e30})
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    **{
        f"_upsample_{kind}2d_aa_backward.default": (
            (f(1, 1, 6, 6), [6, 6], [1, 1, 4, 4], False, 1.5, 1.5),
            {4: 1e30},
        )
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    "grid_sampler_2d_backward.default": (
        (f(2, 3, 5, 5), f(2, 3, 4, 4), f(2, 5, 5, 2), 0, 0, True, [True, True]),
        {0: f(2, 2, 5, 5), 2: f(1, 5, 5, 2), 3: 7},
    ),
    "grid_sampler_3d_backward.default": (
        (f(2, 3, 5, 5, 5), f(2, 3, 4, 4, 4), f(2, 5, 5, 5, 3), 0, 0, True, [True, True]),
        {0: f(2, 3, 5, 5, 2), 4: -1},
    ),
    "_fft_c2c.default": ((f(3, 4).to(torch.complex64), [1], 0, True), {1: [HUGE], 2: 9}),
    "_fft_r2c.default": ((f(3, 4), [1], 0, True), {1: [0, 0]}),
    "_fft_c2r.default": ((f(3, 3).to(torch.complex64), [1], 0, 4), {3: 400}),
    "_cdist_backward.default": ((f(3, 4), f(3, 2), f(4, 2), 2.0, f(3, 4)), {0: f(5), 2: f(4, 3), 4: f(5, 2)}),
    "_pdist_backward.default": ((f(6), f(4, 2), 2.0, f(6)), {1: f(9, 2), 3: f(1)}),
    "lu_unpack.default": ((f(3, 3), i32(1, 2, 3)), {1: i32(1, 2, 4)}),
    "linalg_lu_solve.default": ((torch.eye(3), i32(1, 2, 3), f(3, 1)), {1: i32(1, 2)}),
    "linalg_ldl_solve.default": ((torch.eye(3), i32(1, 2, 3), f(3, 1)), {1: i32(-2, 2, 3), 2: f(4, 1)}),
    "embedding_dense_backward.default": ((f(2, 4), i(1, 9), 10, -1, False), {0: f(1, 4), 1: i(1, 10), 2: 0}),
    "embedding_bag.padding_idx": ((f(5, 3), *BAGS, False, 0, False, None, False, None), {1: i(1, 5, 2, 0)}),
    "_embedding_bag.default": ((f(5, 3), *BAGS), {1: i(1, -1, 2, 0), 2: i(0, -HUGE)}),
    "_embedding_bag_forward_only.default": ((f(5, 3), *BAGS), {2: i(0, 5)}),
    "_embedding_bag_backward.default": (
        (f(2, 3), *BAGS, i(), i(3, 1), i(), 5, False, 0, False, None, -1),
        {0: f(1, 3), 2: i(0, 1, 3), 3: i(0, 0, 0, 2), 6: 4, 9: True},
    ),
    "_embedding_bag_dense_backward.default": (
        (f(2, 3), BAGS[0], i(0, 0, 0, 1), i(3, 1), i(), 5, False, 0, None, -1),
        {0: f(1, 3), 2: i(0, 0, 0, 2), 5: 4},
    ),
    "_embedding_bag_per_sample_weights_backward.default": (
        (f(2, 3), f(5, 3), *BAGS, i(), 0, -1),
        {0: f(0, 3), 2: i(1, 5, 2, 0)},
    ),
    "ctc_loss.IntList": ((*CTC, 0, 1, False), {1: i(1, 2, 9).expand(2, 3), 2: [8, 7], 3: [4, 2], 4: 5}),
    "ctc_loss.Tensor": ((*CTC[:2], i(7, 7), i(3, 2), 0, 1, False), {1: i(1, 2, 9).expand(2, 3)}),
    "_ctc_loss.default": (CTC, {1: i(1, 2, 9).expand(2, 3), 3: [4, 2]}),
    "nll_loss_backward.default": ((f(), f(2, 3), i(2, -100), None, 1, -100, f()), {2: i(0, 3)}),
    "nll_loss2d_backward.default": (
        (f(), f(1, 3, 1, 2), i(2, -100).reshape(1, 1, 2), None, 1, -100, f()),
        {2: i(0, -HUGE).reshape(1, 1, 2)},
    ),
    "multi_margin_loss_backward.default": ((f(), f(2, 3), i(0, 2), 1, 1.0, None, 1), {0: f(0), 2: i(0, 3), 5: f(2)}),
    "multilabel_margin_loss_backward.default": (
        (f(), f(2, 3), i(0, -1, -1, 1, 2, -1).reshape(2, 3), 1, f(2, 3)),
        {0: f(0), 2: i(0, 1, 3, 0, 0, 0).reshape(2, 3), 4: f(2)},
    ),
}

ELSEWHERE = {
    "cudnn_batch_norm": "runs on CUDA alone",
    "_fused_rms_norm_backward": "runs on CUDA alone",
    "embedding_bag": "as `embedding_bag.padding_idx`",
    "_native_batch_norm_legit.no_stats_out": "as `_native_batch_norm_legit.no_stats`",
    "lu_solve": "deprecated, warns",
    "_ctc_loss_backward": "below",
}


def called(name: str) -> Callable[..., Any]:
    return resolve(f"aten::{name}", None, frozenset())


@pytest.mark.parametrize("name", CALLS)
def test_call_as_autograd_makes_it_passes(name):
    called(name)(*(a.clone() if isinstance(a, torch.Tensor) else a for a in CALLS[name][0]))


CHANGED = [(name, place) for name, (_, changes) in CALLS.items() for place in changes]


@pytest.mark.parametrize(("name", "place"), CHANGED, ids=[f"{name}-{place}" for name, place in CHANGED])
def test_call_that_would_leave_its_memory_is_refused(name, place):
    args, changes = CALLS[name]
    with pytest.raises(BundleInvalid) as caught:
        called(name)(*args[:place], changes[place], *args[place + 1 :])
    assert str(caught.value) == (
        f"operator `aten::{name}` is called with arguments that do not fit together, and that its kernel does not "
        "check: the bundle is broken, or an argument of the call holds indices out of range"
    )


def test_ctc_backward_is_refused_with_another_table_than_the_forward_gave():
    nll, alpha = torch.ops.aten._ctc_loss.default(*CTC)
    backward = called("_ctc_loss_backward.default")
    assert backward(f(2), *CTC, nll, alpha, 0).shape == CTC[0].shape
    for changed in (
        (f(1), *CTC, nll, alpha, 0),
        (f(2), *CTC, nll[:1], alpha, 0),
        (f(2), *CTC, nll, alpha[:, :, :6], 0),
    ):
        with pytest.raises(BundleInvalid):
            backward(*changed)


def test_every_check_has_a_call_here():
    tested = {name for name in CHECKS if name in CALLS or any(call.split(".")[0] == name for call in CALLS)}
    assert set(CHECKS) - tested - set(ELSEWHERE) == set()


def test_graph_that_reads_past_its_memory_is_refused_by_a_loaded_bundle(crafted: Crafted):
    crafted.node("forward", op="aten::as_strided.default", args=["linear", [1], [1], (1 << 63) - 1])
    module = load(crafted.seal(), target="autograd")
    with pytest.raises(BundleInvalid) as caught:
        module(torch.ones(3, 4))
    assert str(caught.value).startswith("operator `aten::as_strided.default` is called with arguments that do not fit")
