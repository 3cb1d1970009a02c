"""Fused attention of CPUs on CUDA devices; forward and backward choose alike, by shapes and dtypes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.nn import functional

aten: Any = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

Kind = Literal["flash", "efficient"]

_FLASH_HEAD = 192
"""Widest head whose backward every device of sm_80 to sm_120 has."""

_BIAS_STEP = 16
"""Rows of a bias begin at multiples of it."""


def fused_kind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> Kind | None:
    """Return which fused attention CUDA devices have for these operands; None: none.

    Flash attention takes half precision without a mask, and aligns a causal triangle that is not square differently.
    Heads of any width are padded. `query` is `[batch, heads, rows, width]`, `key` and `value` `[batch, heads, columns,
    width]`, whose heads several of queries may share; `mask` is truths, or a tensor to add to scores, and broadcasts to
    `[batch, heads, rows, columns]`. Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    operands = (query, key, value)
    if query.dtype not in (*HALF, torch.float32) or any(tensor.dtype != query.dtype for tensor in operands):
        return None
    if any(tensor.dim() != 4 for tensor in operands) or (mask is not None and is_causal):
        return None
    if any(not _same(tensor.shape[0], query.shape[0]) for tensor in operands) or not _grouped(query, key, value):
        return None
    if any(type(each.shape[3]) is not int or any(type(n) is int and n == 0 for n in each.shape) for each in operands):
        return None
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return None
    if query.dtype == torch.float32 or mask is not None:
        return "efficient"
    if query.shape[3] != value.shape[3] or query.shape[3] > _FLASH_HEAD:
        return "efficient"
    return "efficient" if is_causal and not _same(query.shape[2], key.shape[2]) else "flash"


def _grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether each head of keys and values serves the same number of heads of queries."""
    heads, shared = query.shape[1], key.shape[1]
    if not _same(shared, value.shape[1]):
        return False
    return _same(heads, shared) or (type(heads) is int and type(shared) is int and shared > 0 and heads % shared == 0)


def _same(size: Any, other: Any) -> bool:
    """Return whether two sizes are equal, without assuming that symbols are."""
    return str(size) == str(other)


def fitted(tensor: torch.Tensor) -> torch.Tensor:
    """Return an operand as fused kernels read it: rows of whole vectors of 16 bytes, padded by zeros."""
    step = 16 // tensor.element_size()
    width = tensor.shape[-1]
    if width % step:
        return functional.pad(tensor, (0, -width % step))
    steps = tensor.stride()
    uneven = any(type(each) is int and each % step for each in (*steps[:-1], tensor.storage_offset()))
    if uneven or not _same(steps[-1], 1):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as efficient attention takes it: added to scores, expanded, its rows aligned."""
    if mask is None:
        return None
    added, columns = mask, key.shape[2]
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        added = zeros.masked_fill(mask.logical_not(), -math.inf)
    added = added.expand(*added.shape[:-1], columns)
    if type(columns) is not int:
        # A whole step more, so that the padding is empty for no size.
        rest = added.new_zeros((*added.shape[:-1], -columns % _BIAS_STEP + _BIAS_STEP))
        added = torch.cat([added, rest], -1)[..., :columns]
    elif columns % _BIAS_STEP:
        added = functional.pad(added, (0, -columns % _BIAS_STEP))[..., :columns]
    else:
        added = added.contiguous()
    return added.expand(query.shape[0], query.shape[1], query.shape[2], columns)


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return results, and the logarithm of each row's sum of exponentials, by an operator of GPUs; None: none fits."""
    kind = fused_kind(query, key, value, mask, is_causal)
    if kind is None:
        return None
    if kind != "flash":
        key, value = for_all_heads(query, key, value)
    fit = [fitted(tensor) for tensor in (query, key, value)]
    if kind == "flash":
        results = aten._scaled_dot_product_flash_attention(*fit, dropout_p, is_causal, False, scale=factor)
    else:
        added = bias(mask, query, key)
        results = aten._scaled_dot_product_efficient_attention(*fit, added, True, dropout_p, is_causal, scale=factor)
    return results[0][..., : value.shape[3]], results[1]


def flash_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Stand for `aten::_scaled_dot_product_flash_attention_for_cpu`; None: GPUs have none for these operands."""
    factor = factor_of(query, scale)
    return fused(query, key, value, attn_mask, 0.0, is_causal, factor)


def flash_for_cpu_backward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Stand for `aten::_scaled_dot_product_flash_attention_for_cpu_backward`; see `flash_for_cpu`."""
    factor = factor_of(query, scale)
    kind = fused_kind(query, key, value, attn_mask, is_causal)
    if kind is None:
        return None
    heads = (key, value) if kind == "flash" else for_all_heads(query, key, value)
    operands = [fitted(tensor) for tensor in (query, *heads)]
    # The kernels read these two in the order `[batch, rows, heads, width]`, and ignore their strides.
    results = [fitted(tensor).transpose(1, 2).contiguous().transpose(1, 2) for tensor in (grad_out, out)]
    if kind == "flash":
        seeds = (_unread((2,), torch.uint64, query), _unread((), torch.uint64, query))
        sizes = (None, None, query.shape[2], key.shape[2])
        gradients = aten._scaled_dot_product_flash_attention_backward(
            results[0], *operands, results[1], logsumexp, *sizes, 0.0, is_causal, *seeds, scale=factor
        )
    else:
        seeds = (_unread((), torch.int64, query), _unread((), torch.int64, query))
        added = bias(attn_mask, query, key)
        wanted = [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            results[0], *operands, added, results[1], logsumexp, *seeds, 0.0, wanted, is_causal, scale=factor
        )
    grad_query, grad_key, grad_value = (
        gradient[..., : tensor.shape[3]] for gradient, tensor in zip(gradients, (query, key, value), strict=False)
    )
    return grad_query, summed_heads(grad_key, key), summed_heads(grad_value, value)


def _unread(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for a seed of attention without dropout, which nothing reads."""
    return torch.empty(shape, dtype=dtype, device=like.device)


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


MOVED: Mapping[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu.default": flash_for_cpu,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default": flash_for_cpu_backward,
}
"""Replacements of operators that CUDA devices do not have, by their full names."""
