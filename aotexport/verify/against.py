"""Compare a bundle with a model file: the model, with the bundle's weights, runs eagerly and the bundle must agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from aotexport.eager.label_free import with_label_free
from aotexport.eager.run import eager_run
from aotexport.errors import VerificationFailed
from aotexport.model.call import ExampleCall
from aotexport.model.programs import NAMED, ModelSource, choose_programs
from aotexport.model.state import State, StateEntry, collect_state
from aotexport.values.subclasses import CLASSES, encode_subclass
from aotexport.vectors.eager_errors import allowing, eager_errors
from aotexport.vectors.record import record_vectors
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import load_parts, parts_of
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.commands.self_test import run_vector
from aotexport_runtime.execution.autocast import device_type_of, under_autocast
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.schema.manifest import StateTensor, step_program
from aotexport_runtime.schema.program import ArgumentInput
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import is_wrapper, parts, type_name


def compare_with_model(
    bundle: Bundle, source: ModelSource, *, targets: Sequence[str], operator_namespaces: Iterable[str] = ()
) -> list[VectorResult]:
    """Compare the bundle with the model of a model file, after giving the model the bundle's weights.

    Calls are recorded anew: the file's example inputs, random values of the same kind, and other sizes of dynamic
    dimensions. There is one result per program, recorded call and target. `VerificationFailed`: the model has other
    parameters, buffers or inputs than the bundle.
    """
    calls, state = _calls(bundle, source)
    _give_weights(bundle, state, source.name)
    options = LoadOptions(operator_namespaces=tuple(operator_namespaces), tensor_types=CLASSES)
    results: list[VectorResult] = []
    for name, call in calls.items():
        program = bundle.program(name)
        _check_inputs([s.path for s in program.inputs if isinstance(s, ArgumentInput)], call, name, source.name)
        forward = bundle.graph(name, program.forward.file)
        autocast = under_autocast(device_type_of(program, None), program.autocast)
        with autocast, eager_run(call, state, program.mode, as_traced=True) as eager:
            vectors = record_vectors(eager, program)[1]
        for each in vectors:
            recorded = bundle.root, each.name, each.record, each.tensors
            found = [run_vector(*recorded, replace(options, target=target)) for target in targets]
            if not all(result.agrees for result in found):
                errors = eager_errors(call, state, program, forward, each)
                found = [allowing(result, errors) for result in found]
            results += found
    return results


def _calls(bundle: Bundle, source: ModelSource) -> tuple[dict[str, ExampleCall], State]:
    """Return the model file's example call of each of the bundle's programs, and the state of the model."""
    names = [name for name in bundle.program_names if name != step_program(bundle.manifest)]
    described = {program.name: program for program in source.programs or () if not isinstance(program, str)}
    programs = [described.get(name, name) for name in names if name in described or name in NAMED]
    specs = choose_programs(source.target, source.example, programs, source.variants)
    state = collect_state(specs[0].call.module)
    calls = {spec.name: spec.call for spec in specs}
    if any(name not in calls for name in names):
        calls = {spec.name: spec.call for spec in with_label_free(specs, state)[0]}
    # Variants under autocast, which the export adds.
    found = {name: calls.get(name.removesuffix(f".{bundle.program(name).autocast}")) for name in names}
    calls = {name: call for name, call in found.items() if call is not None}
    missing = [name for name in names if name not in calls]
    if missing:
        raise VerificationFailed(f"`{source.name}` describes no program `{missing[0]}`, which the bundle has", missing)
    return calls, state


def _give_weights(bundle: Bundle, state: State, file: str) -> None:
    stored = {entry.name: entry for entry in bundle.manifest.state}
    own = {name: entry for entry in state.entries for name in entry.names}
    # Constants that tracing found in code have no name in the model; the results show if one has changed.
    named = {name: entry for name, entry in stored.items() if entry.role != "constant" or name in own}
    problems = [f"`{name}` is in the bundle alone" for name in named if name not in own]
    problems += [
        f"`{entry.names[0]}` is in `{file}` alone"
        for entry in state.entries
        if entry.role != "constant" and not stored.keys() & set(entry.names)
    ]
    problems += [
        problem for name, entry in named.items() if name in own and (problem := _misfit(name, own[name], entry))
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems[:40])
        raise VerificationFailed(f"the weights of the bundle do not fit the model of `{file}`:\n{lines}", problems)
    stored = load_parts(bundle, [part for entry in named.values() for part in parts_of(entry)])
    with torch.no_grad():
        for tensor, part in zip((part for name in named for part in parts(own[name].tensor)), stored, strict=True):
            tensor.copy_(part)


def _misfit(name: str, own: StateEntry, stored: StateTensor) -> str | None:
    if encode_subclass(own.tensor, f"`{name}`") != stored.subclass:
        need = "plain" if stored.subclass is None else f"a `{stored.subclass.type}`"
        have = f"a `{type_name(type(own.tensor))}`" if is_wrapper(own.tensor) else "plain"
        return f"`{name}` is {need} in the bundle and {have} in the model, or its context is another"
    have = f"{dtypes.name_of(own.tensor.dtype)}{list(own.tensor.shape)}"
    need = f"{stored.dtype}{list(stored.shape)}"
    hint = " (give --dtype as at the export)" if tuple(own.tensor.shape) == stored.shape else ""
    return None if have == need else f"`{name}` is {need} in the bundle and {have} in the model{hint}"


def _check_inputs(expected: list[str], call: ExampleCall, program: str, file: str) -> None:
    missing = [path for path in expected if path not in call.paths]
    if missing:
        raise VerificationFailed(
            f"program `{program}` has the tensor inputs {', '.join(expected)}; the example call of `{file}` has "
            f"{', '.join(call.paths) or 'none'}",
            missing,
        )
