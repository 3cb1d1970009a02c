"""Options of ONNX models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aotexport.errors import ModelFileInvalid
from aotexport_runtime.values.arguments import check_type


@dataclass(frozen=True)
class OnnxOptions:
    """How a bundle's programs become ONNX models.

    Attributes:
        opset: operator set.
        state: `refuse`: programs that change state or inputs, or return views of them, are refused. `outputs`: changed
            tensors are returned after their outputs, and views are returned as copies.
        programs: which programs; empty: all that record no gradients.
        translations: ONNX Script functions by the operator of torch that they translate, beside torch's own.
    """

    opset: int = 20
    state: Literal["refuse", "outputs"] = "refuse"
    programs: tuple[str, ...] = ()
    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)


def check_options(options: OnnxOptions) -> None:
    """Refuse wrong options before anything is done; `ModelFileInvalid`: names the option or the missing package."""
    check_type("options", options, OnnxOptions, "`OnnxOptions`")
    missing = [name for name in ("onnx", "onnxscript", "onnx_ir", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelFileInvalid(f"ONNX needs {', '.join(missing)}: `pip install 'aotexport[onnx]'`")
    from aotexport.lower.onnx.translate import OPSETS

    if options.opset not in OPSETS:
        raise ModelFileInvalid(f"no operator set {options.opset}; there are {OPSETS[0]} to {OPSETS[-1]}")
    if options.state not in ("refuse", "outputs"):
        raise ModelFileInvalid(f"no way {options.state!r} for state in ONNX; there are refuse, outputs")
