"""Fused attention on another kind of device than it was captured on: by torch's own attention there.

The backward computes the forward again, under autograd. So nobody reads what an operator returns beside its result
(statistics of rows, states of generators) but for the seed of a dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from aotexport_runtime.execution.preconditions.table import guarded

aten: Any = torch.ops.aten

_BY_ROWS = ("flash_attention_for_cpu", "efficient_attention")
"""Attention whose results are `[batch, rows, heads, width]` in memory; others lay them out as their operands are."""

_MOVED: Mapping[str, tuple[str, ...]] = {
    "cuda": ("flash_attention_for_cpu",),
    "cpu": ("flash_attention", "efficient_attention", "cudnn_attention"),
}
"""Per kind of device, attention that it does not have; each has a forward and a backward."""

_PREFIX = "aten::_scaled_dot_product_"
_ATTENTION = guarded("scaled_dot_product_attention.default", aten.scaled_dot_product_attention.default)


def replacement(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return the replacement of operator `name`, with its signature, on a kind of device; None: the operator runs."""
    base = name.removeprefix(_PREFIX).removesuffix(".default")
    kind = base.removesuffix("_backward")
    if kind in _MOVED.get(device_type, ()):
        return partial(_forward if base == kind else _backward, kind)
    return _with_seeds_on_the_host if (base, device_type) == ("efficient_attention_backward", "cuda") else None


def _forward(kind: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    call = _named(kind, args, kwargs)
    query, dropout_p = call["query"], call["dropout_p"]
    seed = torch.randint(1 << 62, ()) if dropout_p else torch.zeros((), dtype=torch.int64)
    with _drawing(dropout_p, None if kind == "flash_attention_for_cpu" else seed):
        out = _attend(call, *_operands(call))
    known = {"output": _laid_out(out, kind, query), "max_q": query.shape[2], "max_k": call["key"].shape[2]}
    known |= {"rng_state": seed, "philox_seed": seed, "cum_seq_q": None, "cum_seq_k": None}
    return tuple(known.get(each.name, query.new_empty(0)) for each in _schema(kind).returns)


def _backward(kind: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    call = _named(f"{kind}_backward", args, kwargs)
    operands = _operands(call)
    wants_mask = call.get("grad_input_mask", [False])[-1] and operands[3] is not None
    taken: list[Any] = [None if each is None else each.detach() for each in operands]
    wanted = [each.requires_grad_() for each in taken[: 4 if wants_mask else 3]]
    with torch.enable_grad(), _drawing(call["dropout_p"], call.get("philox_seed")):
        out = _attend(call, *taken)
        gradients = torch.autograd.grad(out, wanted, call.get("grad_out", call.get("grad_out_")))
    laid_out = [_laid_out(gradient, kind, like) for gradient, like in zip(gradients[:3], operands, strict=False)]
    return (*laid_out, *gradients[3:], *[None] * (len(_schema(f"{kind}_backward").returns) - len(gradients)))


def _schema(name: str) -> Any:
    return getattr(aten, f"_scaled_dot_product_{name}").default._schema


def _named(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those that it leaves out."""
    parameters = _schema(name).arguments
    defaults = {each.name: each.default_value for each in parameters if each.has_default_value()}
    return defaults | dict(zip((each.name for each in parameters), args, strict=False)) | {**kwargs}


def _operands(call: Mapping[str, Any]) -> list[Any]:
    """Return query, key, value and mask, which may be None."""
    return [call["query"], call["key"], call["value"], call.get("attn_mask", call.get("attn_bias"))]


def _attend(call: Mapping[str, Any], *operands: Any) -> torch.Tensor:
    shares_heads = operands[0].shape[-3:-2] != operands[1].shape[-3:-2]
    options = {"scale": call["scale"], "enable_gqa": shares_heads}
    return _ATTENTION(*operands, call["dropout_p"], call["is_causal"], **options)


@contextmanager
def _drawing(dropout_p: float, seed: torch.Tensor | None) -> Generator[None, None, None]:
    """Draw what a processor draws from `seed`; processors have no fused attention with dropout of their own."""
    if not dropout_p:
        yield
        return
    if seed is None:
        raise ValueError("CPUs have no fused attention with dropout")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        yield


def _laid_out(value: torch.Tensor, kind: str, like: torch.Tensor) -> torch.Tensor:
    """Return a result, or the gradient of `like`, as the operator lays it out, which later views rely on."""
    steps = like.stride()
    order = [0, 2, 1, 3] if kind in _BY_ROWS else sorted(range(4), key=lambda axis: -steps[axis])
    return value.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


def _with_seeds_on_the_host(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """Call `aten::_scaled_dot_product_efficient_attention_backward` with the seeds where it reads them.

    It reads them on the host, unless a CUDA graph is captured; a forward that was captured left them on the device.
    Source: torch 2.13, aten/src/ATen/native/transformers/cuda/attention_backward.cu, `Note [Seed and Offset Device]`.
    """
    call = _named("efficient_attention_backward", args, kwargs)
    if call["dropout_p"]:
        query = call["query"]
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
        place = query.device if captured else torch.device("cpu")
        call |= {name: call[name].to(place) for name in ("philox_seed", "philox_offset")}
    return aten._scaled_dot_product_efficient_attention_backward(**call)
