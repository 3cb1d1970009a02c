"""Guards of calls through ONNX Runtime, beside those of arguments: models know neither gradients nor memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.rule import GuardRule, GuardSource, input_name
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.values.tensors import NumpyTensor, is_torch_tensor


@dataclass(frozen=True)
class ModelInputs:
    """Facts for guards of ONNX models.

    Attributes:
        program: the program that the model computes.
        written: inputs that calls write to.
    """

    program: Program
    written: Sequence[int]


@dataclass(frozen=True)
class Written:
    """A pair of arguments; calls write to the first."""

    index: int
    path: str
    other: int
    other_path: str


def _tensors(inputs: ModelInputs) -> list[int]:
    return [index for index, spec in enumerate(inputs.program.inputs) if isinstance(spec, ArgumentInput)]


def _written(inputs: ModelInputs) -> list[Written]:
    specs = inputs.program.inputs
    paths = {index: spec.path for index, spec in enumerate(specs) if not isinstance(spec, StateInput)}
    return [Written(index, paths[index], other, paths[other]) for index, other in product(inputs.written, paths)]


def _require_grad(*values: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    return any(is_torch_tensor(value) and value.requires_grad for value in values)


def _records_nothing(source: GuardSource, inputs: ModelInputs) -> str:
    return f"not {source.constant(_require_grad)}({', '.join(map(input_name, _tensors(inputs)))})"


def _requires_nothing(source: GuardSource, inputs: ModelInputs) -> str:
    if not source.kind.has_autograd:
        return "True"
    return " and ".join(f"not {input_name(index)}.requires_grad" for index in _tensors(inputs)) or "True"


def _is_as_models_read(source: GuardSource, index: int) -> str:
    value = input_name(index)
    if source.kind.has_autograd:
        return f"{value}.is_contiguous() and not {value}.is_neg()"
    return f"{value}.flags.c_contiguous"


def _is_writable(value: Any) -> bool:
    return not isinstance(value, NumpyTensor) or value.value.flags.writeable


def _share(a: Any, b: Any) -> bool:
    if is_torch_tensor(a) and is_torch_tensor(b):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return isinstance(a, NumpyTensor) and isinstance(b, NumpyTensor) and np.may_share_memory(a.value, b.value)


MODEL: tuple[GuardRule[ModelInputs, Any], ...] = (
    GuardRule(
        name="no gradients",
        cost="tensor",
        of=lambda inputs: [inputs],
        holds=_records_nothing,
        quick=_requires_nothing,
        stricter=True,
        error=NotSupported,
        message=lambda inputs, call: (
            f"an input of program `{inputs.program.name}` requires grad, and ONNX models record no gradients. Call it "
            "under `torch.no_grad()`, or load target `portable`"
        ),
    ),
    GuardRule(
        name="as models read it",
        cost="tensor",
        of=_tensors,
        holds=_is_as_models_read,
        message=None,
    ),
    GuardRule(
        name="writable",
        cost="tensor",
        of=_written,
        holds=lambda source, each: f"{source.constant(_is_writable)}({input_name(each.index)})",
        quick=lambda source, each: None,
        error=NotSupported,
        message=lambda each, call: f"the program changes `{each.path}`, which is a read-only array",
    ),
    GuardRule(
        name="memory of its own",
        cost="memory",
        of=_written,
        holds=lambda source, each: (
            f"not {source.constant(_share)}({input_name(each.index)}, {input_name(each.other)})"
            if each.index != each.other
            else "True"
        ),
        quick=lambda source, each: None,
        error=NotSupported,
        message=lambda each, call: (
            f"the program changes `{each.path}`, which shares memory with `{each.other_path}`, and the "
            "model does not know. Pass a copy, or load target `portable`"
        ),
    ),
)
"""Guards of the inputs of an ONNX model."""
