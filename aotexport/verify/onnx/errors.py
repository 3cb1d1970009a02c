"""The error of float32 in a call, by the forward graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.draws import drawing
from aotexport.model.refusals import attempt
from aotexport.vectors.eager_errors import has_16_bits, worth_recording
from aotexport_runtime import load
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.onnx_calls import Calls, calling, observed
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import Program
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation

_OTHERS = 6
"""Number of further calls, near this one, that measure the error: a single one may round well by luck."""
_NEAR = 2.0**-16
"""How far, relative to itself, a value of such a call may be from that of this one: some hundred roundings."""


def own_errors(bundle: Bundle, program: Program, model: OnnxModel, calls: Calls) -> dict[str, float]:
    """Return the errors of float32 in calls by name of the value, as `Vector.eager_errors` has them.

    The forward graph runs in float32 and in float64; `vectors.eager_errors` does so with the model's own code, which is
    not here. Only errors that allow for more than the tolerance are returned; none, if float64 tells nothing.
    """
    if has_16_bits(bundle.graph(program.name, program.forward.file)):
        return {}
    namespaces = bundle.manifest.requirements.operator_namespaces
    options: dict[str, Any] = {"target": "autograd", "check_digests": False, "operator_namespaces": namespaces}
    generator = torch.Generator().manual_seed(0)
    errors: dict[str, float] = {}
    try:
        with attempt("float64 run"):
            narrow, wide = load(bundle.root, **options), load(bundle.root, dtype=torch.float64, **options)
            for number in range(1 + _OTHERS):
                near = (lambda value: _near(value, generator)) if number else (lambda value: value)
                values = [near(value) if isinstance(value, torch.Tensor) else value for value in calls.values]
                ours, truth = narrow.twin(), wide.twin()
                for own, true in zip(ours.state_tensors().values(), truth.state_tensors().values(), strict=True):
                    own.data.copy_(near(own.data))
                    true.data.copy_(own.data)
                found = seen(ours, program, model, replace(calls, values=values))
                wide_values = [_to_float64(value) for value in values]
                exact = seen(truth, program, model, replace(calls, values=wide_values))
                exact.values = {name: value.to(found.values[name].dtype) for name, value in exact.values.items()}
                for each in compare(Observation({}, found.values), Observation({}, exact.values)):
                    errors[each.name] = max(errors.get(each.name, 0.0), each.error)
    except (ExportFailed, NotSupported):
        return {}
    return worth_recording(errors)


def seen(module: BundleModule, program: Program, model: OnnxModel, calls: Calls) -> Observation:
    """Return what calls of a loaded bundle show that the model has too; dropout draws what the model does."""
    call = drawing(program, calling(program, module.program(program.name), module.state_tensors))
    return observed(program, model, calls, call, module.state_tensors)


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _near(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    by = (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1) * _NEAR
    return (tensor.double() * (1 + by.to(tensor.device))).float()
