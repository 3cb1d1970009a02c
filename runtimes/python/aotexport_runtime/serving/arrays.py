"""Values of calls: arrays of numpy and tensors of torch. No torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aotexport_runtime.serving.interface import TensorSpec
from aotexport_runtime.values.tensors import is_torch_tensor

_KINDS = "biufc"
"""Kinds of arrays that tensors have."""


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return an output as an array, with the tensor's memory if it can; bfloat16 and float8 as float32."""
    if not is_torch_tensor(value):
        return np.asarray(value, np.int64) if isinstance(value, int) else value
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    return (tensor.float() if is_rare(str(tensor.dtype).removeprefix("torch.")) else tensor).numpy()


def is_rare(dtype: str) -> bool:
    """Return whether numpy lacks a dtype, all of whose values float32 has: bfloat16 and float8."""
    return dtype == "bfloat16" or dtype.startswith("float8")


def text_of(name: str, value: Any, violations: list[str]) -> str:
    """Return a string of a call, which is one by itself or the element of an array; report what is none."""
    found = np.asarray(value, object).ravel()
    text = found[0] if found.size == 1 else value
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if not isinstance(text, str):
        violations.append(f"`{name}`: expected a string, got {text!r:.100}")
        return ""
    return text


def value_of(spec: TensorSpec, value: Any, violations: list[str]) -> Any:
    """Return a value of a call as an array, tensor or integer; report one that is none."""
    if not is_torch_tensor(value):
        value = np.asarray(value)
        if value.dtype.kind not in _KINDS:
            violations.append(f"`{spec.name}`: expected an array or a tensor, got an array of {value.dtype}")
            return value
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
    if spec.is_number:
        if math.prod(value.shape) != 1 or "int" not in str(value.dtype):
            violations.append(f"`{spec.name}`: expected an integer, got {value.dtype}{list(value.shape)}")
            return 0
        return int(value.item())
    return value
