"""Verification of an ONNX model: ONNX Runtime against what eager execution gave, and against the forward graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aotexport.errors import VerificationFailed
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.lower.onnx.translate import example_sizes
from aotexport.verify import Comparison
from aotexport_runtime import OnnxRuntime, dtypes, load
from aotexport_runtime.bundle import Bundle
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.engines.onnx.session import open_session, run_session
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.observe import Observation, compare, make_inputs
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.self_test import arguments_of, flat_outputs, read_vector
from aotexport_runtime.sizes import evaluate
from aotexport_runtime.trees import leaves

TARGET = "onnx"
_SEED = 20240229
_MAX_NUMEL = 1 << 24


def check_model(bundle: Bundle, program: Program, model: OnnxModel, options: OnnxOptions) -> list[Comparison]:
    """Compare an ONNX model with the recorded calls, and with the forward graph on random calls of other sizes.

    Args:
        bundle: with the model in it.
        program: its program.
        model: its entry in the manifest.
        options: how it was made.

    Returns:
        Every compared output.

    Raises:
        VerificationFailed: it disagrees, or ONNX Runtime does not run it; names the first value that differs.
    """
    try:
        session = open_session(bundle, model, OnnxRuntime())
    except NotSupported as error:
        raise VerificationFailed(f"program `{program.name}`: {error}", [str(error)]) from None
    calls = [*_recorded(bundle, program), *_random(bundle, program)]
    found: list[Comparison] = []
    for name, values, expected in calls:
        comparisons = _compare(program, model, session, name, values, expected)
        if not all(comparison.agrees for comparison in comparisons):
            from aotexport.lower.onnx.locate import first_difference

            where = first_difference(bundle, program, model, options, values)
            lines = [_line(comparison) for comparison in comparisons if not comparison.agrees]
            raise VerificationFailed(
                "ONNX Runtime disagrees with eager execution; nothing was written:\n" + "\n".join([*lines, where]),
                lines,
            )
        found += comparisons
    return found


def _line(comparison: Comparison) -> str:
    what = comparison.detail or (
        f"largest absolute difference {comparison.absolute:.2e}, relative to the largest value {comparison.error:.2e}"
    )
    return f"  {comparison.program}/{comparison.vector} (onnx): {comparison.name}: {what}"


def _compare(
    program: Program, model: OnnxModel, session: Any, call: str, values: Sequence[Any], expected: Observation
) -> list[Comparison]:
    base = {"program": program.name, "vector": call, "target": TARGET}
    try:
        outputs = run_session(session, model.inputs, values, model.outputs[: len(program.outputs)])
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:300]
        return [
            Comparison(**base, name="call", error=math.inf, absolute=math.inf, agrees=False, detail=f"raises {first}")
        ]
    got = Observation()
    for path, index in _output_paths(program):
        note_output(got, path, _as_torch(outputs[index], program.outputs[index]))
    return [
        Comparison(
            **base,
            name=difference.name,
            error=difference.error,
            absolute=difference.absolute,
            agrees=difference.agrees,
            detail=f"expected {difference.expected}, got {difference.got}" if difference.expected else "",
        )
        for difference in compare(expected, got)
    ]


def _as_torch(value: Any, meta: Any) -> Any:
    if meta is None:
        return int(value)
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return torch.view_as_complex(tensor) if meta.dtype.startswith("complex") else tensor


def note_output(seen: Observation, path: str, value: Any) -> None:
    """Note value, dtype and shape of an output, which is all that ONNX keeps of one."""
    if not isinstance(value, torch.Tensor):
        seen.facts[path] = repr(value)
        return
    seen.tensor(path, value)
    seen.facts[path] = seen.facts[path].partition(" strides ")[0]


def _output_paths(program: Program) -> list[tuple[str, int]]:
    return [(path, leaf.index) for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]


# --- calls ------------------------------------------------------------------------------------------------

_Call = tuple[str, list[Any], Observation]


def _recorded(bundle: Bundle, program: Program) -> list[_Call]:
    """Return the recorded calls with the outputs that eager execution gave at the first one."""
    found: list[_Call] = []
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        values = make_inputs(vector.inputs, stored, None, Environment().form).values
        expected = Observation()
        for path, _ in _output_paths(program):
            name = f"call 0: {path}"
            expected.facts[path] = vector.facts[name].partition(" strides ")[0]
            for suffix in ("", " norm"):
                if name + suffix in vector.values:
                    expected.values[path + suffix] = stored[f"v{vector.values.index(name + suffix)}"]
        found.append((entry.name, [_detached(value) for value in values], expected))
    return found


def _random(bundle: Bundle, program: Program) -> list[_Call]:
    """Return calls of other sizes per dynamic dimension, with what the forward graph gives."""
    examples = [entry for entry in bundle.manifest.testvectors if entry.program == program.name]
    if not program.dimensions or not examples:
        return []
    vector, stored = read_vector(bundle, examples[0])
    sources = {spec.path: stored[spec.key] for spec in vector.inputs if spec.value is None}
    namespaces = bundle.manifest.requirements.operator_namespaces
    module = load(bundle.root, target="autograd", check_digests=False, operator_namespaces=namespaces)
    arguments = arguments_of(program)
    generator = torch.Generator().manual_seed(_SEED)
    found: list[_Call] = []
    for name, symbols in _sizes(program):
        values = _arguments(program, symbols, sources, generator)
        if values is None:
            continue
        args, kwargs = arguments([_copied(value) for value in values], module.state_tensors())
        with torch.no_grad():
            try:
                returned = module.twin().program(program.name)(*args, **kwargs)
            except Exception:
                # Sizes that the model itself refuses say nothing about its ONNX form.
                continue
        expected = Observation()
        for path, value in flat_outputs(program.output_tree, returned):
            note_output(expected, path, value)
        found.append((name, values, expected))
    return found


def _sizes(program: Program) -> list[tuple[str, dict[str, int]]]:
    """Return sizes to try: per dimension its least, two in between, and the greatest where that is small."""
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
