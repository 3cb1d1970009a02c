"""The calls that verify an ONNX model: the recorded ones, and random ones of other sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aotexport.lower.onnx.plain import plain
from aotexport.lower.onnx.rebuild import rebuild
from aotexport.lower.onnx.translate import example_sizes
from aotexport_runtime import load
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.commands.self_test import read_vector
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.observe import NORM, NORMS, Observation, make_inputs
from aotexport_runtime.values.sizes import evaluate
from aotexport_runtime.values.trees import leaves

_SEED = 20240229
_MAX_NUMEL = 1 << 24
_CALLS = 2
_REFUSALS = (RuntimeError, ValueError, IndexError)
"""Errors of operators and guards for sizes that they do not take."""
_AFTER, _STATE = " afterwards", "state "


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Consecutive calls with the same arguments.

    Attributes:
        name: name of the calls.
        values: flat arguments.
        count: number of calls.
        expected: outputs and changes.
        refused: why there is nothing to compare with; empty: there is.
        eager_errors: see `Vector`.
    """

    name: str
    values: list[Any]
    count: int
    expected: Observation
    refused: str = ""
    eager_errors: dict[str, float] = field(default_factory=dict)


def recorded(bundle: Bundle, program: Program, model: OnnxModel) -> list[Calls]:
    """Return the recorded calls, with eager's outputs and changes."""
    found: list[Calls] = []
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        values = make_inputs(vector.inputs, stored, None, Environment().form).values
        expected = Observation(sample=vector.sample)
        for name in _noted(program, model, vector):
            expected.facts[name] = vector.facts[name].partition(" strides ")[0]
            for key in (name, name + NORM, name + NORMS):
                if key in vector.values:
                    expected.values[key] = stored[f"v{vector.values.index(key)}"]
        values = [_detached(value) for value in values]
        count, errors = _count(program, model, vector.calls), vector.eager_errors
        found.append(Calls(name=entry.name, values=values, count=count, expected=expected, eager_errors=errors))
    return found


def _noted(program: Program, model: OnnxModel, vector: Vector) -> Iterator[str]:
    """Yield the names in an observation that an ONNX model has too: outputs and changes."""
    changed = changed_names(program, model)
    names = [path for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]
    names += [path + _AFTER for path in changed] + [_STATE + name for name in changed]
    for number in range(_count(program, model, vector.calls)):
        yield from (name for name in (f"call {number}: {name}" for name in names) if name in vector.facts)


def random_calls(bundle: Bundle, program: Program, model: OnnxModel) -> list[Calls]:
    """Return calls of other sizes per dynamic dimension, with the results of the forward graph."""
    examples = [entry for entry in bundle.manifest.testvectors if entry.program == program.name]
    if not program.dimensions or not examples:
        return []
    vector, stored = read_vector(bundle, examples[0])
    sources = {spec.path: stored[spec.key] for spec in vector.inputs if spec.value is None}
    observe = _reference(bundle, program, model)
    generator = torch.Generator().manual_seed(_SEED)
    count = _count(program, model, _CALLS)
    found: list[Calls] = []
    for name, symbols in _sizes(program):
        expected, refused = Observation(), ""
        values = _arguments(program, symbols, sources, generator)
        if values is None:
            refused, values = f"more than {_MAX_NUMEL:,} elements", []
        try:
            for number in range(0 if refused else count):
                observe(expected, number, values)
        except _REFUSALS as error:
            refused = f"the model refuses it: {first_line(error)}"
        found.append(Calls(name=name, values=values, count=count, expected=expected, refused=refused))
    return found


def _reference(bundle: Bundle, program: Program, model: OnnxModel) -> Callable[[Observation, int, Sequence[Any]], None]:
    """Return a function that observes a numbered call of the forward graph; number 0 begins with a fresh module."""
    if any(isinstance(spec, StateInput) and spec.subclass is not None for spec in program.inputs):
        return _plain_reference(bundle, program)
    namespaces = bundle.manifest.requirements.operator_namespaces
    module = load(bundle.root, target="autograd", check_digests=False, operator_namespaces=namespaces)
    changed, twins = changed_names(program, model), [module.twin()]

    def observe(seen: Observation, number: int, values: Sequence[Any]) -> None:
        if number == 0:
            twins[0] = module.twin()
        run, state = twins[0].program(program.name), twins[0].state_tensors
        run_call(seen, f"call {number}: ", program, changed, run, values, state)

    return observe


def _plain_reference(bundle: Bundle, program: Program) -> Callable[[Observation, int, Sequence[Any]], None]:
    """Do as `_reference` by the plain graph of a program whose state is of a tensor subclass not imported here."""
    taken = plain(bundle, program)
    namespaces = bundle.manifest.requirements.operator_namespaces
    rebuilt = rebuild(taken.program, taken.graph, taken.tensors, namespaces=namespaces)

    def observe(seen: Observation, number: int, values: Sequence[Any]) -> None:
        with torch.no_grad():
            outputs = rebuilt.module(*[_copied(value) for value in values])
        for path, leaf in leaves(program.output_tree, "output"):
            if isinstance(leaf, Leaf):
                value = outputs[leaf.index]
                is_size = program.outputs[leaf.index] is None
                note_output(seen, f"call {number}: {path}", int(value) if is_size else value)

    return observe


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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def changed_names(program: Program, model: OnnxModel) -> list[str]:
    """Return the names of state tensors, and paths of arguments, that a call changes or replaces."""
    return sorted({rebind.name for rebind in program.rebinds} | {*model.updates})


def _count(program: Program, model: OnnxModel, calls: int) -> int:
    """Return the number of calls worth comparing: one if nothing is changed."""
    return calls if changed_names(program, model) else 1


def run_call(
    seen: Observation,
    where: str,
    program: Program,
    changed: Collection[str],
    run: Callable[..., Any],
    values: Sequence[Any],
    state: Callable[[], Mapping[str, Any]],
) -> None:
    """Call a program with copies of flat arguments; note its outputs and changes."""
    values = [_copied(value) for value in values]
    for path, value in outputs_of(program, run, values, state()).items():
        note_output(seen, where + path, value)
    paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]
    for path, value in zip(paths, values, strict=True):
        if path in changed:
            note_output(seen, f"{where}{path}{_AFTER}", value)
    for name in changed:
        if name not in paths:
            note_output(seen, f"{where}{_STATE}{name}", state()[name])


def outputs_of(
    program: Program, run: Callable[..., Any], values: Sequence[Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Call a program with flat arguments, which it may write to; return its outputs by path."""
    args, kwargs = arguments_of(program)(values, defaultdict(lambda: None, state))
    with torch.no_grad():
        returned = run(*args, **kwargs)
    return dict(flat_outputs(program.output_tree, returned))


def note_output(seen: Observation, path: str, value: Any) -> None:
    """Note value, dtype and shape of an output, the only facts that ONNX has."""
    if isinstance(value, np.ndarray):
        # The output of a call without tensors.
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        seen.facts[path] = repr(value)
        return
    seen.tensor(path, value)
    seen.facts[path] = seen.facts[path].partition(" strides ")[0]
