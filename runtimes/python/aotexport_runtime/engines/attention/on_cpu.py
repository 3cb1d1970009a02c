"""Fused attention of CUDA devices on CPUs, by the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from aotexport_runtime.engines.attention.definition import (
    attend,
    attend_backward,
    by_rows,
    factor_of,
)

_STATISTICS_STEP = 32
"""Rows of efficient attention's statistics are padded to multiples of it."""


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return results, statistics, and the seed of the dropout."""
    seed = torch.randint(1 << 62, (), dtype=torch.int64) if dropout_p else torch.zeros((), dtype=torch.int64)
    dropout_mask = _dropout_mask(query, key, dropout_p, seed)
    out, logsumexp = attend(query, key, value, mask, is_causal, factor_of(query, scale), dropout_mask)
    return out, logsumexp, seed


def _dropout_mask(query: torch.Tensor, key: torch.Tensor, dropout_p: float, seed: torch.Tensor) -> torch.Tensor | None:
    """Return the factors of the weights under dropout; None: there is no dropout."""
    if not dropout_p:
        return None
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.rand((*query.shape[:3], key.shape[2]), generator=generator)
    return (drawn >= dropout_p).to(torch.float32) / (1 - dropout_p)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Stand for `aten::_scaled_dot_product_flash_attention`."""
    out, logsumexp, seed = _forward(query, key, value, None, dropout_p, is_causal, scale)
    state = torch.stack([seed, torch.zeros_like(seed)]).view(torch.uint64)
    unused = torch.zeros((), dtype=torch.uint64)
    return out, logsumexp, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand for `aten::_scaled_dot_product_flash_attention_backward`."""
    dropout_mask = _dropout_mask(query, key, dropout_p, philox_seed.view(torch.int64).flatten()[0])
    factor = factor_of(query, scale)
    gradients = attend_backward(grad_out, query, key, value, out, logsumexp, None, is_causal, factor, dropout_mask)
    return gradients[:3]


def efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Stand for `aten::_scaled_dot_product_efficient_attention`."""
    out, logsumexp, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    rows = -query.shape[2] % _STATISTICS_STEP
    padded = functional.pad(logsumexp, (0, rows)) if compute_log_sumexp else logsumexp[..., :0]
    return by_rows(out), padded, seed, torch.zeros_like(seed)


def efficient_backward(
    grad_out_: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Stand for `aten::_scaled_dot_product_efficient_attention_backward`."""
    dropout_mask = _dropout_mask(query, key, dropout_p, philox_seed)
    statistics = logsumexp[..., : query.shape[2]]
    gradients = attend_backward(
        grad_out_, query, key, value, out, statistics, attn_bias, is_causal, factor_of(query, scale), dropout_mask
    )
    biased = gradients[3].to(attn_bias.dtype) if attn_bias is not None and grad_input_mask[3] else None
    return by_rows(gradients[0]), by_rows(gradients[1]), by_rows(gradients[2]), biased


def cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Stand for `aten::_scaled_dot_product_cudnn_attention`."""
    out, logsumexp, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    sizes = (None, None, query.shape[2], key.shape[2])
    return out, logsumexp.unsqueeze(-1), *sizes, seed, torch.zeros_like(seed), None


def cudnn_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand for `aten::_scaled_dot_product_cudnn_attention_backward`."""
    dropout_mask = _dropout_mask(query, key, dropout_p, philox_seed)
    factor, statistics = factor_of(query, scale), logsumexp.squeeze(-1)
    gradients = attend_backward(
        grad_out, query, key, value, out, statistics, attn_bias, is_causal, factor, dropout_mask
    )
    return gradients[:3]
