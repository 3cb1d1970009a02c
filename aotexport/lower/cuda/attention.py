"""Attention: the CPU's fused operators, for which a GPU needs others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query.float(), key.float().transpose(-2, -1)) * factor
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows, -math.inf)
    return scores if mask is None else scores + mask


def _check(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError("fused attention with dropout")


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(dropout_p)
    scores = _scores(query, key, is_causal, attn_mask, scale)
    logsumexp = torch.logsumexp(scores, -1)
    return torch.matmul(torch.softmax(scores, -1), value.float()).to(query.dtype), logsumexp


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(dropout_p)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = torch.exp(_scores(query, key, is_causal, attn_mask, scale) - logsumexp.unsqueeze(-1))
    grad = grad_out.float()
    grad_value = torch.matmul(weights.transpose(-2, -1), grad)
    grad_weights = torch.matmul(grad, value.float().transpose(-2, -1))
    inner = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner) * factor
    grad_query = torch.matmul(grad_scores, key.float())
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), query.float())
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


REWRITES: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}
"""Operators that only CPUs have, with functions of operators that every device has; layouts are the caller's."""
