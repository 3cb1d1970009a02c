"""NVIDIA's device functions for Triton's interpreter, which has none: torch's CPU operators of the same meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from aotexport.errors import VerificationFailed

_SAME_NAME = (
    *("erf", "erfc", "erfinv", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "tanh"),
    *("sinh", "cosh", "tan", "sin", "cos", "asin", "acos", "atan", "asinh", "acosh", "atanh", "floor", "ceil", "trunc"),
    *("abs", "lgamma", "isnan", "isinf", "signbit", "pow", "fmod", "atan2", "hypot", "copysign", "nextafter"),
)
_OTHER_NAMES = {
    "nearbyint": torch.round,
    "rint": torch.round,
    "fabs": torch.abs,
    "sqrt_rn": torch.sqrt,
    "div_rn": torch.div,
}
_TO_BOOL = ("isnan", "isinf", "signbit")


class Libdevice:
    """Replaces `libdevice` in a kernel's module."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(torch, name) if name in _SAME_NAME else _OTHER_NAMES.get(name)
        if function is None:
            raise VerificationFailed(f"the interpreter has no function for `libdevice.{name}`", [])
        return lambda *args: _apply(function, args, to_bool=name in _TO_BOOL)


def _apply(function: Callable[..., torch.Tensor], args: tuple[Any, ...], *, to_bool: bool) -> Any:
    first = next(arg for arg in args if isinstance(arg, tl.tensor))
    operands = [_operand(arg) for arg in args]
    data = function(*operands).numpy()
    scalar = tl.int1 if to_bool else first.dtype.scalar
    data = data if to_bool else data.astype(first.handle.data.dtype)
    type_ = tl.block_type(scalar, list(first.shape)) if isinstance(first.type, tl.block_type) else scalar
    return tl.tensor(TensorHandle(data, scalar), type_)


def _operand(arg: Any) -> torch.Tensor:
    if not isinstance(arg, tl.tensor):
        return torch.tensor(getattr(arg, "value", arg))
    return torch.from_numpy(np.ascontiguousarray(arg.handle.data)).reshape(arg.handle.data.shape)
