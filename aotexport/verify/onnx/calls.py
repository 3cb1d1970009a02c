"""The forward graph as the reference of an ONNX model: calls of other sizes, and the error of float32 in a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.plain import plain
from aotexport.lower.onnx.rebuild import Rebuilt
from aotexport.lower.onnx.translate import example_sizes
from aotexport.model.refusals import attempt
from aotexport.vectors.eager_errors import has_16_bits, worth_recording
from aotexport_runtime import load
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.onnx_calls import Calls, FlatCall, calling, calls_of, observed
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation
from aotexport_runtime.values.sizes import evaluate
from aotexport_runtime.values.trees import leaves

_SEED = 20240229
_MAX_NUMEL = 1 << 24
_TOO_LARGE = f"more than {_MAX_NUMEL:,} elements"
_CALLS = 2
_REFUSALS = (RuntimeError, ValueError, IndexError)
"""Errors of operators and guards for sizes that they do not take."""
_OTHERS = 6
"""Number of further calls, near this one, that measure the error: a single one may round well by luck."""
_NEAR = 2.0**-16
"""How far, relative to itself, a value of such a call may be from that of this one: some hundred roundings."""


def random_calls(bundle: Bundle, program: Program, model: OnnxModel) -> list[Calls]:
    """Return calls of other sizes per dynamic dimension, with the results of the forward graph."""
    examples = [entry for entry in bundle.manifest.testvectors if entry.program == program.name]
    if not program.dimensions or not examples:
        return []
    vector, stored = read_vector(bundle, examples[0])
    sources = {spec.path: stored[spec.key] for spec in vector.inputs if spec.value is None}
    refer = _reference(bundle, program, model)
    generator = torch.Generator().manual_seed(_SEED)
    count = calls_of(program, model, _CALLS)
    found: list[Calls] = []
    for name, symbols in _sizes(program):
        values = _arguments(program, symbols, sources, generator)
        calls = Calls(name=name, values=values or [], count=count)
        try:
            calls = replace(calls, expected=refer(calls)) if values is not None else replace(calls, refused=_TOO_LARGE)
        except _REFUSALS as error:
            calls = replace(calls, refused=f"the model refuses it: {first_line(error)}")
        found.append(calls)
    return found


def _reference(bundle: Bundle, program: Program, model: OnnxModel) -> Callable[[Calls], Observation]:
    """Return a function that observes calls of the forward graph, from the state of the bundle on."""
    if any(isinstance(spec, StateInput) and spec.subclass is not None for spec in program.inputs):
        plainly = _plain_call(bundle, program)
        return lambda calls: observed(program, model, calls, plainly, dict)
    namespaces = bundle.manifest.requirements.operator_namespaces
    module = load(bundle.root, target="autograd", check_digests=False, operator_namespaces=namespaces)
    return lambda calls: _observed(module.twin(), program, model, calls)


def _plain_call(bundle: Bundle, program: Program) -> FlatCall:
    """Return the call of the plain graph of a program whose state is of a tensor subclass not imported here."""
    taken = plain(bundle, program)
    namespaces = bundle.manifest.requirements.operator_namespaces
    rebuilt = Rebuilt(taken.program, taken.graph, taken.tensors, namespaces=namespaces)

    def call(values: list[Any]) -> list[tuple[str, Any]]:
        with torch.no_grad():
            outputs = rebuilt(*values)
        found = [(path, leaf.index) for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]
        return [(path, int(outputs[i]) if program.outputs[i] is None else outputs[i]) for path, i in found]

    return call


def _sizes(program: Program) -> list[tuple[str, dict[str, int]]]:
    """Return sizes to try: per dimension its least, two in between, and the greatest if that is small."""
    usual = example_sizes(program)
    found: list[tuple[str, dict[str, int]]] = []
    for dimension in program.dimensions:
        least = dimension.min or 0
        limit = dimension.max if dimension.max is not None else 1 << 30
        for size in sorted({least, min(limit, least + 2), min(limit, 16), min(limit, 33)}):
            symbols = {**usual, dimension.symbol: max(size, least)}
            if 0 not in symbols.values() and all(evaluate(guard, symbols) for guard in program.guards):
                found.append((f"{dimension.name}={symbols[dimension.symbol]}", symbols))
    return found


def _arguments(
    program: Program, symbols: Mapping[str, int], sources: Mapping[str, torch.Tensor], generator: torch.Generator
) -> list[Any] | None:
    """Return arguments of these sizes, drawn from the elements of the example's; None: they are too large."""
    values: list[Any] = []
    for spec in program.inputs:
        if isinstance(spec, SizeInput):
            values.append(symbols[spec.symbol])
        elif isinstance(spec, ArgumentInput):
            shape = [evaluate(size, symbols) for size in spec.meta.shape]
            source = sources[spec.path]
            if math.prod(shape) > _MAX_NUMEL or not source.numel():
                return None
            values.append(source[torch.randint(source.numel(), shape, generator=generator)])
            assert values[-1].dtype == dtypes.dtype(spec.meta.dtype)
        else:
            assert isinstance(spec, StateInput)
    return values


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
                found = _observed(ours, program, model, replace(calls, values=values))
                wide_values = [_to_float64(value) for value in values]
                exact = _observed(truth, program, model, replace(calls, values=wide_values))
                exact.values = {name: value.to(found.values[name].dtype) for name, value in exact.values.items()}
                for each in compare(Observation({}, found.values), Observation({}, exact.values)):
                    errors[each.name] = max(errors.get(each.name, 0.0), each.error)
    except (ExportFailed, NotSupported):
        return {}
    return worth_recording(errors)


def _observed(module: BundleModule, program: Program, model: OnnxModel, calls: Calls) -> Observation:
    call = calling(program, module.program(program.name), module.state_tensors)
    return observed(program, model, calls, call, module.state_tensors)


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _near(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    by = (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1) * _NEAR
    return (tensor.double() * (1 + by.to(tensor.device))).float()
