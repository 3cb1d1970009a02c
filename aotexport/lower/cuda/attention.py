"""Attention that CPUs compute by its definition and GPUs fuse: with dropout, or with a mask that has a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from aotexport.capture.forward import ForwardCapture
from aotexport.capture.functional import Refused, capture_functional_graph
from aotexport.lower.cuda.layout import laid_out_in
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport_runtime.engines.attention.definition import factor_of, for_all_heads
from aotexport_runtime.engines.attention.on_cuda import bias, fitted, fused_kind

aten: Any = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default
_FUSED_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default


def with_fused_attention(forward: ForwardCapture, functional: FunctionalCapture, *, grad: bool) -> FunctionalCapture:
    """Return a functional graph in which attention is the operators of GPUs, wherever they have one.

    Args:
        forward: the program before autograd.
        functional: its functional graph, returned where it has no attention by definition, or where another has other
            inputs or outputs.
        grad: whether it is a joint graph.
    """
    calls = len(_nodes(forward.graph, ATTENTION))
    if calls == len(_nodes(functional.module, _FUSED_ON_CPU)) or forward.effects.autograd_functions:
        return functional
    fused = capture_functional_graph(forward, grad=grad, instead={ATTENTION: _attention})
    if isinstance(fused, Refused) or list(_interface(fused.module)) != list(_interface(functional.module)):
        return functional
    return fused


def _nodes(module: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=target)


def _interface(module: torch.fx.GraphModule) -> Iterator[Any]:
    """Yield what a graph takes and returns."""
    outputs: Any = module.graph.output_node().args[0]
    for value in (*module.graph.find_nodes(op="placeholder"), *outputs):
        shown = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        is_tensor = isinstance(shown, torch.Tensor)
        yield (shown.dtype, str([*shown.shape, *shown.stride()])) if is_tensor else str(shown)


def _attention(
    like: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention by an operator of GPUs, laid out as `like`; by torch's function where they have none."""
    kind = fused_kind(query, key, value, attn_mask, is_causal)
    factor = factor_of(query, scale)
    if kind is None or (not enable_gqa and query.shape[1] != key.shape[1]):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, factor, enable_gqa
        )
    if kind != "flash":
        key, value = for_all_heads(query, key, value)
    fit = [fitted(tensor) for tensor in (query, key, value)]
    if kind == "flash":
        results = aten._scaled_dot_product_flash_attention(*fit, dropout_p, is_causal, False, scale=factor)
    else:
        added = bias(attn_mask, query, key)
        results = aten._scaled_dot_product_efficient_attention(*fit, added, True, dropout_p, is_causal, scale=factor)
    return laid_out_in(results[0][..., : value.shape[3]], like)
