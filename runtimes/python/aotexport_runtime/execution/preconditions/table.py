"""What operators need beyond torch's own checks, so that no argument makes their kernels leave their memory.

Threat: a bundle calls an operator of the list with sizes, indices or lengths that its kernel trusts: the kernels of
backward passes expect those of the forward kernel, others those of the Python function around them. The kernel then
reads or writes foreign memory, or divides by zero. Defence: `guarded` checks these arguments before each call, by
shape, and by value where memory is addressed by values.

Source: torch 2.13, aten/src/ATen/native: LossCTC.cpp, Normalization.cpp, EmbeddingBag.cpp, WeightNorm.cpp,
Distance.cpp, BatchLinearAlgebra.cpp, SpectralOps.cpp, DilatedMaxPool2d.cpp, DilatedMaxPool3d.cpp,
GridSampler.cpp; cpu/*Kernel.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.errors import CheckFailed
from aotexport_runtime.execution.preconditions import (
    arithmetic,
    embeddings,
    linear_algebra,
    losses,
    memory,
    normalization,
    sequences,
    windows,
)
from aotexport_runtime.execution.preconditions.require import Arguments, is_recorded


def guarded(name: str, function: Any, *, proven: bool = False) -> Callable[..., Any]:
    """Return `function` with the check of its arguments before it, or with zeros in what it leaves as it found it.

    It is `function` itself if torch checks all arguments, and writes all results.

    Args:
        name: of the operator, `base.overload`.
        function: the operator's overload.
        proven: whether its indices need no look (`dataflow`).
    """
    if name in memory.FRESH:
        return _with_schema(memory.zeroed(function), function)
    if name in memory.GROWING:
        return _with_schema(memory.grown(function), function)
    if name == "set_data.default":
        return _with_schema(memory.moved(function), function)
    base = name.partition(".")[0]
    check = PROVEN[base] if proven else PRECONDITIONS.get(name, PRECONDITIONS.get(base))
    if check is None and base.startswith("_foreach_"):
        check = arithmetic.lists
    schema: Any = function._schema
    if check is None and any(argument.name == "reduction" for argument in schema.arguments):
        check = losses.reduction
    places = (
        () if name in _BY_ELEMENT else [item.name for item in schema.arguments if item.kwarg_only and item.is_write]
    )
    keeps = base in KEPT
    if check is None and not places and not keeps:
        return function
    complete = WRITTEN.get(base)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    # By their names in the operator set: a release may have others.
    signature = signature_of(aten_signatures()[name])
    assert signature is not None
    names = [parameter.name for parameter in signature.positional]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not all(map(_has_memory, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        kept = keeps and is_recorded(arguments)
        if kept:
            args, kwargs = memory.own(args), {key: memory.own(value) for key, value in kwargs.items()}
            arguments |= {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            if check is not None:
                check(arguments)
            for place in places:
                memory.place(kwargs[place], f"`{place}`")
        except CheckFailed as error:
            raise CheckFailed(f"operator `aten::{name}`: {error}") from None
        results = function(*args, **kwargs)
        for place in places:
            # Not every kernel tells that it has resized this tensor (`kron.out`).
            increment_version(kwargs[place])
        if complete is not None:
            complete(arguments, results)
        return memory.own(results) if kept else results

    return _with_schema(call, function)


def _with_schema(call: Callable[..., Any], function: Any) -> Callable[..., Any]:
    call._schema = function._schema  # pyright: ignore[reportFunctionMemberAccess] (as an overload has)
    return call


def _has_memory(value: Any) -> bool:
    """Return whether a kernel runs on a tensor: in a trace, and on the meta device, none does."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return not value.is_meta
    return not isinstance(value, torch.Tensor)


_BY_ELEMENT = frozenset(
    ("where.self_out", *(f"{base}_backward.grad_input" for base in ("gelu", "sigmoid", "silu", "tanh", "threshold")))
)
"""Operators into a given tensor that engines call for themselves; their kernels check it."""

_POLYNOMIALS = (
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
)

PRECONDITIONS: dict[str, Callable[[Arguments], None]] = {
    **dict.fromkeys(("ctc_loss", "_ctc_loss"), sequences.ctc),
    "_ctc_loss_backward": sequences.ctc_backward,
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), linear_algebra.fourier),
    **dict.fromkeys(
        (
            *("native_batch_norm", "native_batch_norm_backward", "batch_norm_backward"),
            *("_batch_norm_with_update", "_batch_norm_with_update_functional", "_native_batch_norm_legit"),
            *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
            *("cudnn_batch_norm", "cudnn_batch_norm_backward"),
        ),
        normalization.batch_norm,
    ),
    "native_group_norm": normalization.group_norm,
    "native_group_norm_backward": normalization.group_norm_backward,
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), normalization.layer_norm_backward),
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), embeddings.embedding_bag),
    **dict.fromkeys(
        (
            *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
            "_embedding_bag_per_sample_weights_backward",
        ),
        embeddings.embedding_bag_backward,
    ),
    "_weight_norm": normalization.weight_norm,
    **dict.fromkeys(("_weight_norm_interface", "_weight_norm_interface_backward"), normalization.fused_weight_norm),
    **dict.fromkeys(("_pdist_forward", "_pdist_backward"), linear_algebra.pairs),
    "pdist": linear_algebra.rows,
    "_grouped_mm": linear_algebra.grouped,
    "_int_mm": linear_algebra.of_bytes,
    "lu_unpack": linear_algebra.pivots("lu"),
    "lu_unpack.out": linear_algebra.unpacked_into,
    **dict.fromkeys(("matrix_power", "linalg_matrix_power"), linear_algebra.power),
    "linalg_ldl_solve": linear_algebra.pivots("ldl"),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward"), windows.pool_backward(2)),
    **dict.fromkeys(("max_pool3d_with_indices_backward", "adaptive_max_pool3d_backward"), windows.pool_backward(3)),
    **{f"fractional_max_pool{axes}d_backward": windows.fractional_pool_backward(axes) for axes in (2, 3)},
    **{f"fractional_max_pool{axes}d": windows.fractional_pool for axes in (2, 3)},
    "unfold_backward": windows.unfold_backward,
    **{
        f"{base}{backward}": windows.grid_sample
        for base in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
        for backward in ("", "_backward")
    },
    "_batch_norm_no_update": normalization.batch_norm_without_update,
    "_native_batch_norm_legit.no_stats": normalization.batch_norm_without_statistics,
    "_native_batch_norm_legit.no_stats_out": normalization.batch_norm_without_statistics,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), sequences.recurrent),
    "_pad_packed_sequence": sequences.unpacked,
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_attention_math"), sequences.attention),
    "_scaled_dot_product_flash_attention_for_cpu": sequences.flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": sequences.flash_attention_backward,
    "embedding_dense_backward": embeddings.embedding_backward,
    **{f"avg_pool{axes}d_backward": windows.mean_backward(axes) for axes in (2, 3)},
    **{f"adaptive_max_pool{axes}d": windows.places for axes in (1, 2, 3)},
    **{f"{form}adaptive_avg_pool{axes}d": windows.places for axes in (1, 2, 3) for form in ("", "_")},
    **{f"_adaptive_avg_pool{axes}d_backward": windows.average_backward(axes) for axes in (2, 3)},
    **{
        f"{kind}_pad{axes}d_backward": windows.padding_backward(axes, kind)
        for kind in ("reflection", "replication")
        for axes in (1, 2, 3)
    },
    **dict.fromkeys(("tril.out", "triu.out", "linalg_lu.out", "linalg_qr.out"), linear_algebra.triangles),
    **dict.fromkeys(("_linalg_eigvals", "linalg_eigvals"), linear_algebra.finite),
    **{f"special_{name}": arithmetic.degree for name in _POLYNOMIALS},
    **dict.fromkeys(("range.step", "range.out"), arithmetic.steps),
    "smooth_l1_loss_backward": arithmetic.differentiable,
    **dict.fromkeys(("linalg__powsum", "_foreach_powsum"), arithmetic.powers),
    "_cdist_backward": losses.distances_backward,
    **dict.fromkeys(("multilabel_margin_loss", "multilabel_margin_loss_forward"), losses.margins),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_backward"), losses.entropy),
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"), arithmetic.leaks),
    **{f"{base}.{form}": arithmetic.medians for base in ("median", "nanmedian") for form in ("dim", "dim_values")},
    **dict.fromkeys(("im2col", "col2im", "max_pool1d"), windows.columns),
    "gelu_backward": arithmetic.gelu_backward,
    **dict.fromkeys(("multi_margin_loss_backward", "multilabel_margin_loss_backward"), losses.margins_backward),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), losses.classes_backward),
    "binomial": arithmetic.counts,
    "matrix_exp_backward": linear_algebra.matrices,
    "native_channel_shuffle": arithmetic.shuffled,
    "tensor_split.sections": arithmetic.sections,
    **dict.fromkeys(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"), memory.strided),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), losses.softmax_backward),
    **dict.fromkeys(("set_.source_Tensor", "set_.source_Tensor_storage_offset"), memory.same_dtype),
    "_chunk_cat": arithmetic.chunks,
    "repeat_interleave": arithmetic.repeats,
    **dict.fromkeys(("lcm", "lcm_"), arithmetic.common_multiple),
    **dict.fromkeys(
        (f"{base}.{other}_mode" for base in ("div", "div_", "divide", "divide_") for other in ("Tensor", "Scalar")),
        arithmetic.truncated,
    ),
    "div.out_mode": arithmetic.truncated,
    **dict.fromkeys(("random.from", "random.from_out", "random_.from"), arithmetic.uniform_integers),
}
"""What to check before an operator runs, by its base name for all overloads, or by its full name."""

KEPT = frozenset(
    (
        *("_ctc_loss", "ctc_loss", "embedding", "embedding_bag", "_embedding_bag", "multi_margin_loss"),
        *("multilabel_margin_loss", "multilabel_margin_loss_forward", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        *("nll_loss_forward", "nll_loss2d", "nll_loss2d_forward", "_grouped_mm"),
        *(f"max_pool{axes}d_with_indices" for axes in (1, 2, 3)),
        *(f"adaptive_max_pool{axes}d" for axes in (1, 2, 3)),
        *(f"fractional_max_pool{axes}d" for axes in (2, 3)),
    )
)
"""Operators whose backward trusts integers that autograd has saved, by base name.

Where autograd records them they take copies of integers and masks, and give copies: nothing of a graph reaches what was
checked and saved. Version counters do not tell of every change: `set_data`, `unsafe_split` and their kin make aliases
with counters of their own, and batch norm raises none.
"""

WRITTEN: dict[str, Callable[[Arguments, Any], None]] = {
    "_ctc_loss": sequences.ctc_written,
    "_grouped_mm": linear_algebra.grouped_written,
    **{f"special_{name}": arithmetic.undefined for name in _POLYNOMIALS},
}
"""What to write into the results of an operator that its kernel leaves as it was."""

PROVEN: dict[str, Callable[[Arguments], None]] = {
    **{f"max_pool{axes}d_with_indices_backward": windows.pool_backward(axes, looks=False) for axes in (2, 3)},
    **{f"adaptive_max_pool{axes}d_backward": windows.pool_backward(axes, looks=False) for axes in (2, 3)},
}
"""The same for operators whose indices are proven by dataflow."""
