"""Fused attention on another kind of device than it was captured on: each kind has operators of its own.

A stand-in takes and returns what its operator does, apart from the layout of results, so forward and backward of a
graph are exchanged one by one. Invariant: both choose by shapes and dtypes alone, so that they choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aotexport_runtime.engines.attention import on_cpu, on_cuda

MOVED: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "cuda": {
        "aten::_scaled_dot_product_flash_attention_for_cpu.default": on_cuda.flash_for_cpu,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default": on_cuda.flash_for_cpu_backward,
    },
    "cpu": {
        "aten::_scaled_dot_product_flash_attention.default": on_cpu.flash,
        "aten::_scaled_dot_product_flash_attention_backward.default": on_cpu.flash_backward,
        "aten::_scaled_dot_product_efficient_attention.default": on_cpu.efficient,
        "aten::_scaled_dot_product_efficient_attention_backward.default": on_cpu.efficient_backward,
        "aten::_scaled_dot_product_cudnn_attention.default": on_cpu.cudnn,
        "aten::_scaled_dot_product_cudnn_attention_backward.default": on_cpu.cudnn_backward,
    },
}
"""Per kind of device, what stands in for operators that it does not have, by their full names."""

CAREFUL: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "cuda": {
        "aten::_scaled_dot_product_efficient_attention_backward.default": on_cuda.efficient_backward,
    },
}
"""Per kind of device, what calls operators that it has where these alone would fail, by their full names."""


def replacement(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return what computes operator `name` on a kind of device; None: the operator itself."""
    return MOVED.get(device_type, {}).get(name) or CAREFUL.get(device_type, {}).get(name)
