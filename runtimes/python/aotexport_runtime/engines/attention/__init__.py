"""Fused attention on another kind of device than it was captured on: each kind has operators of its own.

A replacement has the signature of its operator, but for the layout of results; forward and backward of a graph are
replaced one by one. Invariant: both choose by shapes and dtypes alone, so that they choose the same.
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
"""Per kind of device, replacements of operators that it does not have, by their full names."""

CAREFUL: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "cuda": {
        "aten::_scaled_dot_product_efficient_attention_backward.default": on_cuda.efficient_backward,
    },
}
"""Per kind of device, wrappers of operators that it has but that would fail on some calls, by their full names."""


def replacement(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return the replacement of operator `name` on a kind of device; None: the operator itself runs."""
    return MOVED.get(device_type, {}).get(name) or CAREFUL.get(device_type, {}).get(name)
