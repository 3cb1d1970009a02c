"""Fake kernels of operators whose result sizes torch cannot tell without running them, or whose strides it mistakes.

Source: torch 2.13, `aten/src/ATen/native/LossCTC.cpp`, `BatchLinearAlgebra.cpp` (`linalg_lstsq_out_info`) and
`GroupedMMUtils.h` (`create_grouped_gemm_output_tensor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotexport.capture.effects.recurrence import pack

aten = torch.ops.aten


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss per sequence, and the table; its last size is that of the longest target with blanks between."""
    steps, batch = log_probs.shape[:2]
    if isinstance(target_lengths, torch.Tensor):
        states = torch.library.get_ctx().new_dynamic_size(min=1)
    else:
        states = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, states))


def _lstsq(
    matrix: torch.Tensor, right: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return solution, residuals, rank and singular values; residuals exist for matrices of full rank only."""
    rows, columns = matrix.shape[-2:]
    is_vector = right.dim() == 1 or right.shape == matrix.shape[:-1]
    columns_right = right.unsqueeze(-1) if is_vector else right
    batch = torch.broadcast_shapes(matrix.shape[:-2], columns_right.shape[:-2])
    driver = driver or ("gelsy" if matrix.device.type == "cpu" else "gels")
    count = columns_right.shape[-1]
    solution = right.new_empty((*batch, count, max(rows, columns))).mT[..., :columns, :]
    real = right.real if right.is_complex() else right
    tall = rows > columns and driver != "gelsy"
    return (
        solution.squeeze(-1) if is_vector else solution,
        real.new_empty((*batch, count) if tall else 0),
        right.new_empty(batch if driver != "gels" else 0, dtype=torch.int64),
        real.new_empty((*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else 0),
    )


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a product per group; supports dtypes that torch's own function for fake tensors does not take.

    Rows are padded to 16 bytes.
    """
    if left.dim() == 2 and right.dim() == 2:
        shape = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:
        shape = (left.shape[-2], right.shape[-1])
    dtype = out_dtype or left.dtype
    step = 16 // dtype.itemsize
    padded = (shape[-1] + step - 1) // step * step
    stride = (padded, 1) if len(shape) == 2 else (shape[1] * padded, padded, 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=left.device)


def _row_by_row(tensor: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Return a contiguous result of the argument's sizes; torch's own functions for fake tensors keep its layout."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _quantised(tensor: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quantised values, and where they are in range, in the argument's layout."""
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _gradient_row_by_row(gradient: torch.Tensor, tensor: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Return a contiguous gradient of the second argument."""
    return _row_by_row(tensor)


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _gradient_row_by_row,
    aten._ctc_loss_backward.Tensor: _gradient_row_by_row,
    aten._grouped_mm.default: _grouped_mm,
    aten._dirichlet_grad.default: _row_by_row,
    aten._sample_dirichlet.default: _row_by_row,
    aten._standard_gamma.default: _row_by_row,
    aten._standard_gamma_grad.default: _row_by_row,
    aten.binomial.default: _row_by_row,
    aten.fractional_max_pool3d_backward.default: _gradient_row_by_row,
    aten.multi_margin_loss_backward.default: _gradient_row_by_row,
    aten.multilabel_margin_loss_backward.default: _gradient_row_by_row,
    aten._pack_padded_sequence.default: pack,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _quantised,
    aten.fake_quantize_per_channel_affine_cachemask.default: _quantised,
    aten.fake_quantize_per_tensor_affine_cachemask.default: _quantised,
    aten.linalg_lstsq.default: _lstsq,
    aten.rrelu_with_noise.default: _row_by_row,
}
"""Functions of fake tensors, per operator."""
