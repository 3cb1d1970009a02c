"""Attention by its definition, forward and backward, on any device; memory grows with the square of the length."""

from __future__ import annotations

import math

import torch

HALF = (torch.float16, torch.bfloat16)


def factor_of(query: torch.Tensor, scale: float | None) -> float:
    """Return the factor of the scores."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def for_all_heads(query: torch.Tensor, *grouped: torch.Tensor) -> list[torch.Tensor]:
    """Return keys or values, which heads of `query` may share, with a head for each."""
    count = query.shape[1]
    return [
        tensor if tensor.shape[1] == count else tensor.repeat_interleave(count // tensor.shape[1], 1)
        for tensor in grouped
    ]


def summed_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `like` from that of its heads, one for each of the query's."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, factor: float
) -> torch.Tensor:
    scores = torch.matmul(_wide(query), _wide(key).transpose(-2, -1)) * factor
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows, -math.inf)
    return scores if mask is None else scores + added_by(mask, scores.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    factor: float,
    dropout_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results, and the logarithm of each row's sum of exponentials.

    Args:
        query: `[batch, heads, rows, width]`.
        key: `[batch, heads, columns, width]`; several heads of queries may share one.
        value: `[batch, heads, columns, width of values]`, with as many heads as keys.
        mask: truths, or a tensor to add to scores; None: there is none.
        is_causal: whether scores above the diagonal are left out.
        factor: see `factor_of`.
        dropout_mask: factors of the weights under dropout; None: there is no dropout.
    """
    key, value = for_all_heads(query, key, value)
    scores = _scores(query, key, mask, is_causal, factor)
    logsumexp = torch.logsumexp(scores, -1)
    weights = _weights(scores, logsumexp)
    weights = weights if dropout_mask is None else weights * dropout_mask
    return torch.matmul(weights, _wide(value)).to(query.dtype), logsumexp


def _weights(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Return the weights of scores; rows that a mask leaves out have none."""
    return torch.exp(scores - logsumexp.masked_fill(logsumexp == -math.inf, 0.0).unsqueeze(-1))


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    factor: float,
    dropout_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value and the added mask; arguments are those of `attend`."""
    keys, values = for_all_heads(query, key, value)
    weights = _weights(_scores(query, keys, mask, is_causal, factor), logsumexp)
    grad = _wide(grad_out)
    grad_weights = torch.matmul(grad, _wide(values).transpose(-2, -1))
    used = weights
    if dropout_mask is not None:
        used, grad_weights = weights * dropout_mask, grad_weights * dropout_mask
    inner = (grad * _wide(out)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner)
    grad_query = torch.matmul(grad_scores, _wide(keys)) * factor
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), _wide(query)) * factor
    grad_value = torch.matmul(used.transpose(-2, -1), grad)
    grad_keys = summed_heads(grad_key.to(key.dtype), key), summed_heads(grad_value.to(value.dtype), value)
    return grad_query.to(query.dtype), *grad_keys, grad_scores


def added_by(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that a mask adds to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask.logical_not(), -math.inf)


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor `[batch, heads, rows, width]` whose memory is ordered `[batch, rows, heads, width]`."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
