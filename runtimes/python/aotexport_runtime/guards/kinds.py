"""The kinds of tensors that quick paths serve: source of questions about a variable's value. No torch at import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Constant = Callable[[Any], str]
"""Returns the name of a constant in generated source."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Source of questions about the tensor in a variable; "True" where there is nothing to ask.

    Attributes:
        is_plain: is it a tensor of this kind, of no subclass?
        has_dtype: has it a dtype, by its name in the format?
        is_on: is it on the first of some types of devices?
        is_strided: is it no sparse tensor?
        has_autograd: whether it has torch's attributes: `stride()`, `requires_grad`.
    """

    is_plain: Callable[[Constant, str], str]
    has_dtype: Callable[[Constant, str, str], str]
    is_on: Callable[[Constant, str, Sequence[str]], str]
    is_strided: Callable[[Constant, str], str]
    has_autograd: bool


ARRAYS = Kind(
    is_plain=lambda constant, value: f"type({value}) is {constant(np.ndarray)}",
    has_dtype=lambda constant, value, dtype: f"{value}.dtype is {constant(np.dtype(dtype))}",
    is_on=lambda constant, value, types: str("cpu" in types),
    is_strided=lambda constant, value: "True",
    has_autograd=False,
)
"""Arrays of numpy, in the processor's order of bytes."""


def torch_tensors() -> Kind:
    """Return the kind of tensors of torch, which this imports."""
    import torch

    from aotexport_runtime.values import dtypes

    def is_on(constant: Constant, value: str, types: Sequence[str]) -> str:
        # Several times as fast as reading the device.
        return (
            f"{value}.is_{types[0]}" if types[0] in ("cpu", "cuda") else f"{value}.device.type == {constant(types[0])}"
        )

    return Kind(
        is_plain=lambda constant, value: (
            f"type({value}) is {constant(torch.Tensor)} or type({value}) is {constant(torch.nn.Parameter)}"
        ),
        has_dtype=lambda constant, value, dtype: f"{value}.dtype is {constant(dtypes.dtype(dtype))}",
        is_on=is_on,
        is_strided=lambda constant, value: f"{value}.layout is {constant(torch.strided)}",
        has_autograd=True,
    )
