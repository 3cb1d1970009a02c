"""What a user may choose about ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class OnnxOptions:
    """How a bundle's programs become ONNX models.

    Attributes:
        opset: operator set.
        state: `refuse`: programs that change state or inputs, or return views of them, are refused. `outputs`: what
            they change is returned after their outputs, and views are returned as copies.
        programs: which programs; empty: all that record no gradients.
        translations: ONNX Script functions by the operator of torch that they stand for, beside torch's own.
    """

    opset: int = 20
    state: Literal["refuse", "outputs"] = "refuse"
    programs: tuple[str, ...] = ()
    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
