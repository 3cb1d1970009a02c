"""Fused attention on another kind of device than it was captured on, by torch's own attention there.

The backward computes the forward again, under autograd, so nobody reads the statistics of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from aotexport_runtime.execution.preconditions.table import guarded

aten: Any = torch.ops.aten

_PREFIX = "aten::_scaled_dot_product_"
_MOVED = {"cuda": ("flash_attention_for_cpu",), "cpu": ("flash_attention", "efficient_attention")}
"""Per kind of device, attention that it lacks. On processors it is asked for beside interpreted kernels alone."""

_ATTENTION = guarded("scaled_dot_product_attention.default", aten.scaled_dot_product_attention.default)


def replacement(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return the replacement of operator `name`, with its signature, on a kind of device; None: the operator runs."""
    base = name.removeprefix(_PREFIX).removesuffix(".default")
    kind = base.removesuffix("_backward")
    if kind in _MOVED.get(device_type, ()):
        return partial(_forward if base == kind else _backward, getattr(aten, f"_scaled_dot_product_{base}").default)
    return _with_seeds_on_the_host if (base, device_type) == ("efficient_attention_backward", "cuda") else None


def _forward(operator: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    call = _named(operator, args, kwargs)
    out = _attend(call, *_operands(call))
    known = {"output": _by_rows(out), "max_q": call["query"].shape[2], "max_k": call["key"].shape[2]}
    return tuple(known.get(each.name, out.new_empty(0)) for each in operator._schema.returns)


def _backward(operator: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    call = _named(operator, args, kwargs)
    operands: list[Any] = [None if each is None else each.detach() for each in _operands(call)]
    wants_mask = call.get("grad_input_mask", [False])[-1] and operands[3] is not None
    wanted = [each.requires_grad_() for each in operands[: 4 if wants_mask else 3]]
    with torch.enable_grad():
        out = _attend(call, *operands)
        gradients = torch.autograd.grad(out, wanted, call.get("grad_out", call.get("grad_out_")))
    count = len(operator._schema.returns) - len(gradients)
    return *map(_by_rows, gradients[:3]), *gradients[3:], *[None] * count


def _named(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those that it leaves out."""
    defaults = {each.name: each.default_value for each in operator._schema.arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | {**kwargs}


def _operands(call: Mapping[str, Any]) -> list[Any]:
    """Return query, key, value and mask, which may be None."""
    return [call["query"], call["key"], call["value"], call.get("attn_mask", call.get("attn_bias"))]


def _attend(call: Mapping[str, Any], *operands: Any) -> torch.Tensor:
    if call["dropout_p"]:
        raise ValueError("fused attention with dropout runs on the kind of device alone that it was captured on")
    shares_heads = operands[0].shape[-3:-2] != operands[1].shape[-3:-2]
    return _ATTENTION(*operands, 0.0, call["is_causal"], scale=call["scale"], enable_gqa=shares_heads)


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
