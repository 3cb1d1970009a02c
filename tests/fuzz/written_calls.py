"""Calls of operators that the samples of torch's own tests never make, for `tests.fuzz.record_calls`."""

from collections.abc import Callable
from typing import Any

import torch

_NUMBERS = torch.randn


def _batch_norm() -> list[Any]:
    return [_NUMBERS(2, 3, 4), torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3)]


def _ctc(lengths: Callable[[list[int]], Any]) -> list[Any]:
    targets = torch.tensor([[1, 2, 2], [3, 1, 0]])
    return [_NUMBERS(6, 2, 4).log_softmax(2), targets, lengths([6, 5]), lengths([3, 2])]


def _ctc_backward(lengths: Callable[[list[int]], Any]) -> list[Any]:
    given = _ctc(lengths)
    loss, alpha = torch.ops.aten._ctc_loss(*given)
    return [torch.ones_like(loss), *given, loss, alpha, 0]


def _bags() -> list[Any]:
    indices, offsets = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2])
    _, bags, sizes, maxima = torch.ops.aten._embedding_bag(_NUMBERS(3, 2), indices, offsets, False, 1)
    return [_NUMBERS(2, 2), indices, bags, sizes, maxima, 3, False, 1, None]


def _packed(gates: int, states: int) -> list[Any]:
    state = _NUMBERS(1, 2, 3)
    weights = [_NUMBERS(3 * gates, 4), _NUMBERS(3 * gates, 3), _NUMBERS(3 * gates), _NUMBERS(3 * gates)]
    hx = state if states == 1 else [state] * states
    return [_NUMBERS(5, 4), torch.tensor([2, 2, 1]), hx, weights, True, 1, 0.0, False, False]


def _weight_norm() -> list[Any]:
    direction, scale = _NUMBERS(3, 4), _NUMBERS(3, 1)
    _, norms = torch.ops.aten._weight_norm_interface(direction, scale)
    return [_NUMBERS(3, 4), direction, scale, norms]


def _lists(count: int) -> list[Any]:
    return [[_NUMBERS(2, 3), _NUMBERS(4)] for _ in range(count)]


def calls() -> dict[str, list[list[Any]]]:
    """Return positional arguments of calls, by operator `base.overload`."""
    image, rows = _NUMBERS(1, 2, 4, 5), torch.tensor([2, 0, 1])
    return {
        "_batch_norm_no_update.default": [[*_batch_norm(), 0.1, 1e-5]],
        "_batch_norm_with_update_functional.default": [[*_batch_norm(), 0.1, 1e-5]],
        "_native_batch_norm_legit_functional.default": [[*_batch_norm(), True, 0.1, 1e-5]],
        "_native_batch_norm_legit_no_training.default": [[*_batch_norm(), 0.1, 1e-5]],
        **{
            name: [[*make(list)], [*make(list), *([True] if "backward" in name else [0, True])]]
            for name, make in (("_ctc_loss.default", _ctc), ("_ctc_loss_backward.default", _ctc_backward))
        },
        "_ctc_loss.Tensor": [_ctc(torch.tensor)],
        "_ctc_loss_backward.Tensor": [_ctc_backward(torch.tensor)],
        "ctc_loss.IntList": [_ctc(list)],
        "ctc_loss.Tensor": [_ctc(torch.tensor)],
        "_embedding_bag_dense_backward.default": [_bags()],
        **{
            f"_foreach_{base}{place}.{kind}": [[*_lists(3), numbers]]
            for base in ("addcdiv", "addcmul")
            for place in ("", "_")
            for kind, numbers in (("Scalar", 2.0), ("ScalarList", [0.5, 2.0]), ("Tensor", torch.tensor([0.5, 2.0])))
        },
        "_foreach_div.Tensor": [[*_lists(1), torch.tensor(2.0)]],
        **{f"_foreach_lerp{place}.List": [_lists(3)] for place in ("", "_")},
        **{f"_foreach_lerp{place}.ScalarList": [[*_lists(2), [0.5, 2.0]]] for place in ("", "_")},
        "_grouped_mm.default": [
            [_NUMBERS(2, 3, 8), _NUMBERS(2, 8, 16)],
            [_NUMBERS(6, 8).bfloat16(), _NUMBERS(2, 8, 16).bfloat16(), torch.tensor([2, 6], dtype=torch.int32)],
        ],
        "_int_mm.default": [[torch.ones(3, 4, dtype=torch.int8), torch.ones(4, 5, dtype=torch.int8)]],
        "_pack_padded_sequence.default": [
            [_NUMBERS(3, 2, 4), torch.tensor([3, 2]), False],
            [_NUMBERS(2, 3), torch.tensor([3, 1]), True],
        ],
        **{
            f"_upsample_{kind}2d_aa.default": [[image, [2, 3], False, None, None]]
            for kind in ("bicubic", "bilinear", "lanczos")
        },
        **{
            f"_upsample_{kind}2d_aa_backward.default": [[_NUMBERS(1, 2, 2, 3), [2, 3], [1, 2, 4, 5], False, None, None]]
            for kind in ("bicubic", "bilinear", "lanczos")
        },
        "_upsample_lanczos2d_aa.vec": [[image, [2, 3], False, None], [image, None, True, [0.5, 2.0]]],
        "_weight_norm_interface_backward.default": [[*_weight_norm(), 0]],
        "affine_grid_generator.default": [
            [_NUMBERS(2, 2, 3), [2, 1, 3, 4], False],
            [_NUMBERS(1, 3, 4), [1, 1, 2, 3, 4], True],
        ],
        "affine_grid_generator_backward.default": [[_NUMBERS(2, 3, 4, 2), [2, 1, 3, 4], False]],
        "conv_tbc.default": [[_NUMBERS(5, 2, 3), _NUMBERS(2, 3, 4), _NUMBERS(4), 1]],
        "detach_.default": [[_NUMBERS(2, 3)]],
        **{
            f"fake_quantize_per_channel_affine{form}.default": [
                [_NUMBERS(2, 3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int32), 1, -8, 7],
                [_NUMBERS(2, 3), torch.ones(2), torch.zeros(2), 0, 0, 255],
            ]
            for form in ("", "_cachemask")
        },
        "glu_jvp.default": [[_NUMBERS(2, 3), _NUMBERS(2, 6), _NUMBERS(2, 6), 1]],
        "gru.data": [_packed(3, 1)],
        "lstm.data": [_packed(4, 2)],
        "rnn_relu.data": [_packed(1, 1)],
        "rnn_tanh.data": [_packed(1, 1)],
        "hash_tensor.default": [[_NUMBERS(2, 3)], [torch.tensor([[1, 2]]), [1]]],
        "linalg_cond.p_str": [[_NUMBERS(3, 3), word] for word in ("fro", "nuc")],
        "nll_loss.default": [[_NUMBERS(3, 4), rows], [_NUMBERS(3, 4), rows, torch.ones(4), 0, 1]],
        "nll_loss2d.default": [[_NUMBERS(2, 4, 3, 1), rows.reshape(1, 3, 1).repeat(2, 1, 1), torch.ones(4)]],
        "orgqr.default": [[_NUMBERS(4, 3), _NUMBERS(3)]],
        "replication_pad3d.default": [[_NUMBERS(1, 2, 3, 3, 3), [1, 0, 2, 1, 0, 1]]],
        "replication_pad3d_backward.default": [[_NUMBERS(1, 2, 4, 6, 4), _NUMBERS(1, 2, 3, 3, 3), [1, 0, 2, 1, 0, 1]]],
    }
