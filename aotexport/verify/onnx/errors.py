"""The error of float32 in a call, by the forward graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.draws import drawing
from aotexport.model.refusals import attempt
from aotexport.torch_internals.calls import tree_leaves, tree_map
from aotexport.vectors.eager_errors import OTHERS, has_16_bits, near, worth_recording
from aotexport_runtime import load
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.onnx_calls import Calls, calling, observed
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import OnnxModel, step_program
from aotexport_runtime.schema.program import Program
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation


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
            steps, narrow = program.name == step_program(bundle.manifest), load(bundle.root, **options)
            wide = narrow if steps else load(bundle.root, dtype=torch.float64, **options)
            wide_values = calls.values if steps else [_to_float64(value) for value in calls.values]
            wider = _InFloat64 if steps else contextlib.nullcontext
            exact = seen(wide.twin(), program, model, replace(calls, values=wide_values), wider)
            for number in range(1 + OTHERS):
                ours, values = narrow.twin(), calls.values
                if number:
                    values = [near(each, generator) if isinstance(each, torch.Tensor) else each for each in values]
                    for own in ours.state_tensors().values():
                        own.data.copy_(near(own, generator))
                found = seen(ours, program, model, replace(calls, values=values))
                truth = {name: value.to(found.values[name].dtype) for name, value in exact.values.items()}
                for each in compare(Observation({}, found.values), Observation({}, truth)):
                    errors[each.name] = max(errors.get(each.name, 0.0), each.error)
    except (ExportFailed, NotSupported):
        return {}
    return worth_recording(errors)


def seen(
    module: BundleModule,
    program: Program,
    model: OnnxModel,
    calls: Calls,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Observation:
    """Return what calls of a loaded bundle show that the model has too; dropout draws what the model does."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with around():
            return module.program(program.name)(*args, **kwargs)

    call = drawing(program, calling(program, called, module.state_tensors))
    return observed(program, model, calls, call, module.state_tensors)


class _InFloat64(TorchDispatchMode):
    """Compute in float64 what a training step does, which no load in another dtype has; what it writes is rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        wide_args, wide_kwargs = tree_map(_to_float64, given)
        result = func(*wide_args, **wide_kwargs)
        if not func._schema.is_mutable:
            return result
        for own, wide in zip(tree_leaves(given), tree_leaves((wide_args, wide_kwargs)), strict=True):
            if own is not wide and isinstance(own, torch.Tensor):
                own.copy_(wide)
        return args[0]


def _to_float64(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
