"""Verification of an ONNX model: ONNX Runtime against what eager execution gave, and against the forward graph."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aotexport.errors import VerificationFailed
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.lower.onnx.translate import example_sizes
from aotexport.lower.onnx.widen import is_narrow, write_wide
from aotexport.verify import Comparison
from aotexport_runtime import OnnxRuntime, dtypes, load
from aotexport_runtime.bundle import Bundle
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.engines.onnx.plan import OnnxPlan
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.observe import Observation, compare, make_inputs
from aotexport_runtime.schema.manifest import Manifest, OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.self_test import arguments_of, flat_outputs, read_vector
from aotexport_runtime.sizes import evaluate
from aotexport_runtime.trees import leaves

TARGET = "onnx"
_SEED = 20240229
_MAX_NUMEL = 1 << 24
_CALLS = 2
_AFTER, _STATE = " afterwards", "state "


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
    with tempfile.TemporaryDirectory() as directory:
        subject = _opened(bundle, program, model, Path(directory))
        return _check(bundle, program, model, options, subject)


@dataclass(frozen=True)
class _Subject:
    """A model, opened, and the state that its calls change."""

    plan: OnnxPlan
    state: dict[str, Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.plan(args, kwargs)


def _opened(bundle: Bundle, program: Program, model: OnnxModel, directory: Path) -> _Subject:
    """Open a model; where ONNX Runtime lacks kernels of bfloat16, one of float32 in its place."""
    state: dict[str, Any] = {}
    try:
        return _Subject(OnnxPlan(bundle, program, model, OnnxRuntime(), state), state)
    except NotSupported as error:
        if is_narrow(bundle.file(model.file)):
            with contextlib.suppress(NotSupported):
                wide = write_wide(bundle.file(model.file), directory)
                replaced = _Replaced(bundle.root, bundle.manifest, model.file, wide)
                return _Subject(OnnxPlan(replaced, program, model, OnnxRuntime(), state), state)
        raise VerificationFailed(
            f"program `{program.name}`: {error}. `--no-verify` writes the model as it is", [str(error)]
        ) from None


class _Replaced(Bundle):
    """A bundle with another file in the place of one of its own."""

    def __init__(self, root: Path, manifest: Manifest, file: str, other: Path) -> None:
        super().__init__(root, manifest)
        self._file, self._other = file, other

    def intact_file(self, path: str) -> Path:
        return self._other if path == self._file else super().intact_file(path)


def _check(
    bundle: Bundle, program: Program, model: OnnxModel, options: OnnxOptions, subject: _Subject
) -> list[Comparison]:
    found: list[Comparison] = []
    for calls in [*_recorded(bundle, program, model), *_random(bundle, program, model)]:
        comparisons = _compare(program, model, subject, calls)
        if not all(comparison.agrees for comparison in comparisons):
            from aotexport.lower.onnx.locate import first_difference

            where = first_difference(bundle, program, model, options, calls.values)
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


def _compare(program: Program, model: OnnxModel, subject: _Subject, calls: _Calls) -> list[Comparison]:
    """Return how ONNX Runtime's results of consecutive calls compare with what is expected of them."""
    base = {"program": program.name, "vector": calls.name, "target": TARGET}
    subject.state.clear()
    got = Observation()
    try:
        for number in range(calls.count):
            where, changed = f"call {number}: ", _changed(program, model)
            _call(got, where, program, changed, subject.run, calls.values, lambda: subject.state)
    except Exception as error:
        detail = f"raises {(str(error).splitlines() or [''])[0][:300]}"
        return [Comparison(**base, name="call", error=math.inf, absolute=math.inf, agrees=False, detail=detail)]
    return [
        Comparison(
            **base,
            name=difference.name,
            error=difference.error,
            absolute=difference.absolute,
            agrees=difference.agrees,
            detail=f"expected {difference.expected}, got {difference.got}" if difference.expected else "",
        )
        for difference in compare(calls.expected, got)
    ]


def _changed(program: Program, model: OnnxModel) -> list[str]:
    """Return the names of state tensors, and paths of arguments, that a call changes or replaces."""
    return sorted({rebind.name for rebind in program.rebinds} | {*model.updates})


def _count(program: Program, model: OnnxModel, calls: int) -> int:
    """Return how many calls tell something: one where nothing is changed."""
    return calls if _changed(program, model) else 1


def _call(
    seen: Observation,
    where: str,
    program: Program,
    changed: Collection[str],
    run: Callable[..., Any],
    values: Sequence[Any],
    state: Callable[[], Mapping[str, Any]],
) -> None:
    """Call a program with copies of flat arguments; note its outputs, and what it changed."""
    values = [_copied(value) for value in values]
    args, kwargs = arguments_of(program)(values, defaultdict(lambda: None, state()))
    with torch.no_grad():
        returned = run(*args, **kwargs)
    for path, value in flat_outputs(program.output_tree, returned):
        note_output(seen, where + path, value)
    paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]
    for path, value in zip(paths, values, strict=True):
        if path in changed:
            note_output(seen, f"{where}{path}{_AFTER}", value)
    for name in changed:
        if name not in paths:
            note_output(seen, f"{where}{_STATE}{name}", state()[name])


def note_output(seen: Observation, path: str, value: Any) -> None:
    """Note value, dtype and shape of an output, which is all that ONNX keeps of one."""
    if isinstance(value, np.ndarray):
        # Of a call without tensors.
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        seen.facts[path] = repr(value)
        return
    seen.tensor(path, value)
    seen.facts[path] = seen.facts[path].partition(" strides ")[0]


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Calls:
    """Consecutive calls with the same arguments.

    Attributes:
        name: of them.
        values: flat arguments.
        count: how many.
        expected: outputs and changes.
    """

    name: str
    values: list[Any]
    count: int
    expected: Observation


def _recorded(bundle: Bundle, program: Program, model: OnnxModel) -> list[_Calls]:
    """Return the recorded calls, with outputs and changes as eager execution gave them."""
    found: list[_Calls] = []
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        values = make_inputs(vector.inputs, stored, None, Environment().form).values
        expected = Observation()
        for name in _noted(program, model, vector):
            expected.facts[name] = vector.facts[name].partition(" strides ")[0]
            for key in (name, f"{name} norm"):
                if key in vector.values:
                    expected.values[key] = stored[f"v{vector.values.index(key)}"]
        values = [_detached(value) for value in values]
        found.append(
            _Calls(name=entry.name, values=values, count=_count(program, model, vector.calls), expected=expected)
        )
    return found


def _noted(program: Program, model: OnnxModel, vector: Vector) -> Iterator[str]:
    """Yield the names of what ONNX keeps of an observation: outputs and changes."""
    changed = _changed(program, model)
    names = [path for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]
    names += [path + _AFTER for path in changed] + [_STATE + name for name in changed]
    for number in range(_count(program, model, vector.calls)):
        yield from (name for name in (f"call {number}: {name}" for name in names) if name in vector.facts)


def _random(bundle: Bundle, program: Program, model: OnnxModel) -> list[_Calls]:
    """Return calls of other sizes per dynamic dimension, with what the forward graph gives."""
    examples = [entry for entry in bundle.manifest.testvectors if entry.program == program.name]
    if not program.dimensions or not examples:
        return []
    vector, stored = read_vector(bundle, examples[0])
    sources = {spec.path: stored[spec.key] for spec in vector.inputs if spec.value is None}
    namespaces = bundle.manifest.requirements.operator_namespaces
    module = load(bundle.root, target="autograd", check_digests=False, operator_namespaces=namespaces)
    changed, count = _changed(program, model), _count(program, model, _CALLS)
    generator = torch.Generator().manual_seed(_SEED)
    found: list[_Calls] = []
    for name, symbols in _sizes(program):
        values = _arguments(program, symbols, sources, generator)
        if values is None:
            continue
        twin, expected = module.twin(), Observation()
        try:
            for number in range(count):
                where = f"call {number}: "
                _call(expected, where, program, changed, twin.program(program.name), values, twin.state_tensors)
        except Exception:
            # Sizes that the model itself refuses say nothing about its ONNX form.
            continue
        found.append(_Calls(name=name, values=values, count=count, expected=expected))
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
