"""Fused attention of processors on GPUs, by torch's own attention there.

The backward computes the forward again, under autograd, so nobody reads the statistics of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotexport_runtime.execution.preconditions.table import guarded

aten: Any = torch.ops.aten

_ATTENTION = guarded("scaled_dot_product_attention.default", aten.scaled_dot_product_attention.default)


def replacement(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return the replacement of operator `name`, with its signature, on a kind of device; None: the operator runs."""
    return _ON_GPUS.get(name.removeprefix("aten::_scaled_dot_product_")) if device_type == "cuda" else None


def _forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    **scale: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if dropout_p:
        raise ValueError("CPUs have no fused attention with dropout")
    shares_heads = query.shape[-3:-2] != key.shape[-3:-2]
    out = _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **scale, enable_gqa=shares_heads)
    return _by_rows(out), query.new_empty(0)


def _backward(grad_out: torch.Tensor, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> tuple[Any, ...]:
    operands = [each.detach().requires_grad_() for each in (query, key, value)]
    _, _, *settings = rest  # without the result and the statistics
    with torch.enable_grad():
        result, _ = _forward(*operands, *settings, **options)
        return tuple(map(_by_rows, torch.autograd.grad(result, operands, grad_out)))


def _by_rows(value: torch.Tensor) -> torch.Tensor:
    """Return a result or gradient as the operator lays it out for later views: `[batch, rows, heads, width]`."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _with_seeds_on_the_host(*args: Any, **kwargs: Any) -> Any:
    """Call `aten::_scaled_dot_product_efficient_attention_backward` with the seeds where it reads them.

    It reads them on the host, unless a CUDA graph is captured; a forward that was captured left them on the device.
    Source: torch 2.13, aten/src/ATen/native/transformers/cuda/attention_backward.cu, `Note [Seed and Offset Device]`.
    """
    (_, query, *_), seeds, dropout_p = args[:7], args[7:9], args[9]
    if dropout_p:
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
        place = query.device if captured else torch.device("cpu")
        args = (*args[:7], *(seed.to(place) for seed in seeds), *args[9:])
    return aten._scaled_dot_product_efficient_attention_backward(*args, **kwargs)


_ON_GPUS: dict[str, Callable[..., Any]] = {
    "flash_attention_for_cpu.default": _forward,
    "flash_attention_for_cpu_backward.default": _backward,
    "efficient_attention_backward.default": _with_seeds_on_the_host,
}
