"""Which engine of an inference program is the fastest here: measured in a recorded call, kept for the next process."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.plan import Plan
from aotexport_runtime.engines.candidates import AUTOGRAD, FROZEN_ENGINES, MODEL_ENGINES, PACKED, PORTABLE, Request
from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.engines.frozen import Frozen, FrozenModel, PackedGraph
from aotexport_runtime.engines.functional.engine import FunctionalEngine
from aotexport_runtime.engines.sized import CLEARLY, Sized, observed
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Function
from aotexport_runtime.execution.matmul.onednn import kept
from aotexport_runtime.execution.user_cache import Measurements, cache_folder
from aotexport_runtime.guards.signature import Bound
from aotexport_runtime.module.onnx_module import runtime_of
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.module.state import BundleState
from aotexport_runtime.submodules.tables import LoadedState
from aotexport_runtime.values.compare import TOLERANCES, compare
from aotexport_runtime.values.observe import Observation, make_inputs

_BUDGET_S = 0.25
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 50

_WARM_S = 1e-3
"""Longest call that is run again even where another takes half of its time."""

_SHORT_S = 0.02
"""Longest call of programs that are compared in all recorded calls, not in the first alone."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of a program: the least time of a call by engine, and why others have none.

    `error` is the largest of layers in the precision that was asked for, relative to the largest magnitude.
    """

    seconds: Annotated[dict[str, float], msgspec.Meta(min_length=1)]
    why_not: dict[str, str]
    error: float = 0.0

    def best(self, usual: str, request: Request) -> str:
        """Return the fastest engine; `usual`, that which rules choose, unless another is clearly faster.

        Layers in the precision that was asked for are the best wherever they serve.
        """
        if request.precision and PACKED in self.seconds:
            return PACKED
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        is_clear = usual not in self.seconds or self.seconds[fastest] <= CLEARLY * self.seconds[usual]
        return fastest if is_clear else usual


def fastest(module: BundleState, plan: Plan, graph: FunctionalEngine) -> list[Engine] | None:
    """Return the engines of the program of `plan`, the fastest first; None: no recorded call can be measured.

    `plan` is that by rules, its record tells the figures; ONNX models stand for the functional `graph`.
    """
    bundle, request, program = module.bundle, module._request, plan.program
    known = {engine.name: engine for engine in (*plan.engines, graph)}
    frozen: dict[str, Frozen] = {}
    refused: dict[str, str] = {}

    weights: LoadedState = module.__dict__["_loaded"]

    def open_model(name: str, symbols: Mapping[str, int]) -> FrozenModel:
        runtime: Any = SimpleNamespace(engine=name, open=functools.partial(runtime_of(name).open, symbols=symbols))
        return FrozenModel(bundle, program, runtime, weights)

    def freeze(name: str) -> None:
        try:
            if name == PACKED:
                frozen[name] = PackedGraph(bundle, program, module._environment, weights, request.precision)
            else:
                frozen[name] = open_model(name, {})
            known[name] = graph.by_native(frozen[name])
        except NotSupported as error:
            refused[name] = str(error)

    cache, usual = kept_figures(bundle, request), plan.engines[0].name
    try:
        figures = msgspec.convert(cache.read().get(program.name), Figures)
    except msgspec.ValidationError:
        figures = None
    if figures is not None and (best := figures.best(usual, request)) in FROZEN_ENGINES:
        freeze(best)
    if figures is None or figures.best(usual, request) not in known:
        for name in (PACKED,) if request.precision else FROZEN_ENGINES if request.frozen else ():
            freeze(name)
        figures = _measure(module, plan, known, frozen, request.precision)
        if figures is None:
            return None
        figures = replace(figures, why_not=figures.why_not | refused)
        cache.add(program.name, msgspec.to_builtins(figures))
    first = known[figures.best(usual, request)]
    others = plan.engines[-1:] if first.name in (PORTABLE, AUTOGRAD) else plan.engines
    chosen = list({engine.name: engine for engine in (first, *others)}.values())
    names = [engine.name for engine in chosen]
    error = f"; {request.precision} has a relative error of {figures.error:.1e} in recorded calls"
    told = error if request.precision and first.name == PACKED else ""
    plan.record.measured(names, figures.seconds, figures.why_not, told)
    engines = [name for name in MODEL_ENGINES if name in figures.seconds]
    if not engines or request.precision:
        return chosen
    try:
        sized = Sized(program, weights, (first.name, _usual(chosen)), open_model, engines, plan.record)
    except NotSupported:
        return chosen
    return [graph.by_native(sized), *(chosen if first.name == AUTOGRAD else chosen[1:])]


def _usual(engines: Sequence[Engine]) -> Function:
    """Return what runs calls by the first engine that takes them."""
    first = engines[0]
    if isinstance(first, FunctionalEngine) and first.name in (PORTABLE, *FROZEN_ENGINES):
        return first.infer  # The guards of the graph that it stands for have been asked.

    def run(inputs: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
        taking = (engine for engine in engines if engine.why_not(inputs, symbols) is None)
        return tuple(next(taking, engines[-1]).run(inputs, symbols))

    return run


def kept_figures(bundle: Bundle, request: Request) -> Measurements:
    """Return the file of what was measured of a bundle's programs on this machine, with these threads and packages."""
    digest = hashlib.sha256(msgspec.json.encode(bundle.manifest.files)).hexdigest()
    packages = [_version(name) for name in ("aotexport-runtime", "onnxruntime", "openvino")]
    more = [digest, request.frozen, request.trust, request.memory_budget, *packages]
    return kept(cache_folder("engines"), torch.get_num_threads(), *more)


def _measure(
    module: BundleState, plan: Plan, engines: Mapping[str, Engine], frozen: Mapping[str, Frozen], precision: str
) -> Figures | None:
    """Return the times of engines that give the results of the forward graph.

    They are those of the first recorded call and of those with smaller arguments, as a batch of one.
    """
    calls: list[Bound] = []
    with torch.no_grad():
        for entry in module.bundle.manifest.testvectors:
            if entry.program == plan.program.name:
                vector, stored = read_vector(module.bundle, entry)
                values = make_inputs(vector.inputs, stored, module.device, module.form).values
                calls.append(plan.bind_flat(values))
        if any(call.violations for call in calls):
            return None
        start, expected = time.perf_counter(), [observed(_run_of(engines[AUTOGRAD], calls[0])())]
        if time.perf_counter() - start <= _SHORT_S:
            expected += [observed(_run_of(engines[AUTOGRAD], call)()) for call in calls[1:]]
        why_not, errors = dict[str, str](), dict[str, float]()
        for name in engines.keys() - {AUTOGRAD}:
            least = TOLERANCES["bfloat16"] if precision and name == PACKED else 0.0
            why_not[name], errors[name] = _why_other(engines[name], calls, expected, least)
        why_not |= {name: native.failure for name, native in frozen.items() if native.failure}
        why_not = {name: reason for name, reason in why_not.items() if reason}
        left = {name: engine for name, engine in engines.items() if name not in why_not}
        timed = [call for call in calls if _nbytes(call) <= _nbytes(calls[0]) and _all_take(left.values(), call)]
        runs = {name: [_run_of(engine, call) for call in timed] for name, engine in left.items()}
        return Figures(seconds=_least(runs), why_not=why_not, error=errors.get(PACKED, 0.0))


def _nbytes(call: Bound) -> int:
    return sum(value.nbytes for value in call.inputs if isinstance(value, torch.Tensor))


def _all_take(engines: Iterable[Engine], call: Bound) -> bool:
    return all(engine.why_not(list(call.inputs), dict(call.symbols)) is None for engine in engines)


def _run_of(engine: Engine, call: Bound) -> Callable[[], Any]:
    return lambda: engine.run(list(call.inputs), dict(call.symbols))


def _why_other(
    engine: Engine, calls: Sequence[Bound], expected: Sequence[Observation], least: float
) -> tuple[str, float]:
    """Return why an engine does not take the place of the forward graph in recorded calls, and its largest error.

    The reason is empty where it does; for `least` see `compare`.
    """
    error = 0.0
    for call, seen in zip(calls, expected, strict=False):
        reason = engine.why_not(list(call.inputs), dict(call.symbols))
        if reason is not None and call is calls[0]:
            return reason, error
        if reason is not None:  # The next engine takes such calls.
            continue
        found = compare(seen, observed(_run_of(engine, call)()), least=least)
        error = max([error, *(each.error for each in found)])
        if not all(each.agrees for each in found):
            return f"a recorded call has other numbers by it: relative error {error:.1e}", error
    return "", error


def _least(runs: Mapping[str, Sequence[Callable[[], Any]]]) -> dict[str, float]:
    """Return the least time of each one's calls, run in turns, by the number of calls.

    Other processes disturb it less than a median of few; with one thread it is processor time, which they do not take.
    What takes twice the time of another is run once, unless it is so short that its first call counts for most.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    end, least = time.perf_counter() + _BUDGET_S, dict.fromkeys(runs, math.inf)
    for count in range(1, _MOST_ROUNDS + 1):
        for name, calls in runs.items():
            if math.inf > least[name] >= max(2 * min(least.values()), _WARM_S):
                continue
            start = clock()
            for run in calls:
                run()
            least[name] = min(least[name], (clock() - start) / len(calls))
        if time.perf_counter() >= end and count >= _LEAST_ROUNDS:
            break
    return least


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
