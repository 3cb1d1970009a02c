"""Eager's own errors, as far as a bundle may differ from eager: its float32 from its float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aotexport.eager.recorded_arguments import RecordedArguments
from aotexport.eager.run import SEED, attention_as_traced, observe_eager
from aotexport.encode.program import FORWARD_FILE, EncodedProgram
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.model.programs import ProgramSpec
from aotexport.model.refusals import attempt
from aotexport.model.state import State, collect_state
from aotexport.process.blocks import quiet
from aotexport.state.mode import in_mode
from aotexport.state.tensors import restored
from aotexport.state.world import attributes_restored
from aotexport.torch_internals.calls import tree_map
from aotexport.vectors.record import RecordedCall, record_path
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.schema.codec import encode_record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.compare import NORMS, TOLERANCES, allowance, compare
from aotexport_runtime.values.observe import Observation

_DIGITS = 3
OTHERS = 6
"""Number of further calls, near this one, that measure the error: a single one may round well by luck."""


class EagerErrors:
    """Judges failed comparisons by eager's own errors, and writes these to the recorded calls of a bundle.

    `notes` has a sentence for the user per program that agrees only by this.
    """

    def __init__(
        self,
        specs: Sequence[ProgramSpec],
        state: State,
        programs: Sequence[EncodedProgram],
        vectors: Iterable[RecordedCall],
        directory: Path,
    ) -> None:
        """Take the calls, a program per call, and the recorded calls of the bundle in a directory; nothing runs yet."""
        self._calls = {program.record.name: spec.call for spec, program in zip(specs, programs, strict=True)}
        self._programs = {program.record.name: program for program in programs}
        self._vectors = {(vector.record.program, vector.name): vector for vector in vectors}
        self._state = state
        self._directory = directory
        self.notes: dict[str, str] = {}
        self._known: dict[tuple[str, str], dict[str, float]] = {}

    def judged(self, results: Iterable[VectorResult], rewrite: Callable[[], object]) -> list[VectorResult]:
        """Return results of the self-test, allowing for eager's own errors; `rewrite` writes a changed manifest."""
        known = len(self._known)
        judged = [result if result.agrees else self._judged(result) for result in results]
        if any(list(self._known.values())[known:]):
            rewrite()
        return judged

    def _judged(self, result: VectorResult) -> VectorResult:
        wrong = [difference for difference in result.differences if not difference.agrees]
        key = result.program, result.vector
        # A value that is not finite is no matter of rounding, and one is enough to fail.
        if result.error or key not in self._vectors or not all(math.isfinite(each.error) for each in wrong):
            return result
        if key not in self._known:
            self._known[key] = self._found(*key)
        own = self._known[key]
        if (judged := allowing(result, own)).agrees:
            most = max(wrong, key=lambda each: each.error)
            self.notes.setdefault(
                key[0],
                f"program {key[0]} is judged by eager's own error: in the recorded call `{key[1]}`, {most.name} is "
                f"{most.error:.1e} from eager's float32, which is {own[most.name]:.1e} from eager's float64",
            )
        return judged

    def _found(self, name: str, call: str) -> dict[str, float]:
        program, vector = self._programs[name], self._vectors[name, call]
        errors = eager_errors(self._calls[name], self._state, program.record, program.graphs[FORWARD_FILE], vector)
        if errors:
            record = msgspec.structs.replace(vector.record, eager_errors=errors)
            record_path(self._directory, vector).write_bytes(encode_record(record))
        return errors


def allowing(result: VectorResult, errors: Mapping[str, float]) -> VectorResult:
    """Return a result whose values may be off as eager's own errors, by name, allow."""
    differences = [
        dataclasses.replace(each, agrees=each.agrees or each.error <= allowance(errors.get(each.name, 0.0)))
        for each in result.differences
    ]
    return dataclasses.replace(result, differences=differences)


def eager_errors(
    call: ExampleCall, state: State, program: Program, forward: Graph, vector: RecordedCall
) -> dict[str, float]:
    """Return the errors of eager's float32 in a recorded call, by name of the value, on the scale of comparisons.

    A copy of the model runs with its tensors of float32 in float64, as the truth. Further runs have parameters near
    those of the call. Only errors that allow for more than the tolerance are returned; none if float64 tells nothing:
    the program draws other random numbers in it, or computes in 16 bits too, or no copy can be made or does run.
    """
    if has_16_bits(forward):
        return {}
    record = vector.record
    expected = {name: vector.tensors[f"v{index}"] for index, name in enumerate(record.values)}
    narrow = {name for name, value in expected.items() if value.dtype == torch.float32}
    narrow |= {name + NORMS for name in narrow}
    generator = torch.Generator().manual_seed(SEED)
    # Branches and loops are compiled where they run, and torch's compiler would compile the mode with them.
    draws = contextlib.nullcontext() if forward.subgraphs else _DrawnInFloat32()
    try:
        with attempt("float64 run"), quiet(), restored(state), attributes_restored(call.module), draws:
            wide, drawn = _in_float64(call, program, vector)
            others = [_nudged(call, program, vector, generator) for _ in range(OTHERS)]
    except ExportFailed:  # Whatever a model's code raises in a dtype that it was not written for.
        return {}
    if any(other != drawn for _, other in others):
        return {}
    truth = {name: value.to(expected[name].dtype) for name, value in wide.values.items() if name in expected}
    errors: dict[str, float] = {}
    for seen in (expected, *(other.values for other, _ in others)):
        for each in compare(Observation({}, dict(seen)), Observation({}, truth)):
            if each.name in narrow:
                errors[each.name] = max(errors.get(each.name, 0.0), each.error)
    return worth_recording(errors)


def worth_recording(errors: Mapping[str, float]) -> dict[str, float]:
    """Return errors that allow for more than the tolerance, with the digits that a record has."""
    rounded = {name: float(f"{error:.{_DIGITS}g}") for name, error in errors.items() if math.isfinite(error)}
    return {name: error for name, error in rounded.items() if allowance(error) > TOLERANCES["float32"]}


_ObservedRun = tuple[Observation, list[bytes]]
"""A run, and the states of the random generator after its calls: equal ones tell that it drew the same numbers."""


def has_16_bits(graph: Graph) -> bool:
    """Return whether a graph computes in 16 bits."""
    metas = [value.meta for value in (*graph.inputs, *graph.nodes)]
    return any(isinstance(m, TensorMeta) and dtypes.dtype(m.dtype) in (torch.float16, torch.bfloat16) for m in metas)


def _in_float64(call: ExampleCall, program: Program, vector: RecordedCall) -> _ObservedRun:
    """Run a recorded call of a copy of the model, with every tensor of float32 in float64."""
    copied, state = _copied(call, program)
    if copied.module is not None:
        copied.module._apply(_to_float64)
    for entry in state.entries:
        for table, key in entry.slots:
            table[key] = entry.tensor = _to_float64(table[key])
    tensors = [_to_float64(leaf) for leaf in call.tensors]
    stored = {spec.key: _to_float64(vector.tensors[spec.key]) for spec in vector.record.inputs if spec.key}
    return _run(dataclasses.replace(copied, tensors=tensors), state, program, vector, stored)


class _DrawnInFloat32(TorchDispatchMode):
    """Draws random numbers in float32, since generators give other numbers in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_written = schema.is_mutable and schema.arguments[0].alias_info is not None
        if torch.Tag.nondeterministic_seeded not in func.tags or schema.is_mutable != is_written:
            return func(*args, **(kwargs or {}))
        args_of_32, kwargs = tree_map(_in_float32, (args, kwargs or {}))
        drawn = func(*args_of_32, **kwargs)
        return args[0].copy_(drawn) if is_written else tree_map(_to_float64, drawn)


def _nudged(call: ExampleCall, program: Program, vector: RecordedCall, generator: torch.Generator) -> _ObservedRun:
    copied, state = _copied(call, program)
    for entry in state.entries:
        if entry.role == "parameter":
            entry.tensor.data.copy_(near(entry.tensor, generator))
    return _run(copied, state, program, vector, vector.tensors)


def near(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of which floats of 32 bits are up to 16 roundings off, as sums in another order are.

    A ReLU whose operand is that near 0 is on its other side in one call or another.
    """
    if tensor.dtype != torch.float32:
        return tensor.detach()
    by = (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1) * 2.0**-19
    return (tensor.detach().double() * (1 + by.to(tensor.device))).float()


def _copied(call: ExampleCall, program: Program) -> tuple[ExampleCall, State]:
    """Return the call of a copy of the module, in the program's mode, and its state; a function is not copied."""
    if call.module is None:
        return call, collect_state(None)
    with in_mode(call.module, program.mode, call.first_call_constants):
        try:
            module = copy.deepcopy(call.module)
        except copy.Error as error:
            raise ExportFailed(f"the module cannot be copied: {error}") from error
    method: Any = call.callable
    callable_ = module if isinstance(method, nn.Module) else method.__func__.__get__(module)
    return dataclasses.replace(call, callable=callable_, first_call_constants=[]), collect_state(module)


def _run(
    call: ExampleCall, state: State, program: Program, vector: RecordedCall, stored: dict[str, torch.Tensor]
) -> _ObservedRun:
    drawn: list[bytes] = []

    def draw(*args: Any, **kwargs: Any) -> Any:
        value = call.callable(*args, **kwargs)
        drawn.append(torch.get_rng_state().numpy().tobytes())
        return value

    watched = dataclasses.replace(call, callable=draw)
    with attention_as_traced():
        arguments = RecordedArguments(vector.name, vector.record.inputs, stored)
        seen = observe_eager(watched, state, program, arguments, vector.record.calls)
    return seen, drawn


def _in_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.float64 else value
    return torch.float32 if value is torch.float64 else value


def _to_float64(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        return tensor
    return tensor.detach().to(torch.float64).requires_grad_(tensor.requires_grad)
