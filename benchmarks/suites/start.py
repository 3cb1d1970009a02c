"""From a fresh process to its first result, beside one that only imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks.figures import Figure, Spread
from benchmarks.measure import alternate
from benchmarks.models import Model
from benchmarks.processes import Fresh
from benchmarks.run import Run, times
from benchmarks.suites.interface import Suite
from benchmarks.systems import System
from benchmarks.systems.torch_compile import COLD

_MOST_ROUNDS = 3
_MODELS = ("gpt2",)
_Key = tuple[str, str]
_IMPORT = ("import torch", "-")
_FIRST = (("inference", "infer"), ("train step", "train"))


def _figures(run: Run) -> Iterator[Figure]:
    for model in run.models("start", _MODELS):
        run.artefacts.prepare(run.systems(), model)
        run.progress(f"start: {model.name}")
        yield from _compare(model, _sources(run, model, cold=False), min(run.rounds, _MOST_ROUNDS))
        yield from _compare(model, _sources(run, model, cold=True), 1)


def _compare(model: Model, sources: Mapping[_Key, Callable[[], Fresh]], rounds: int) -> Iterator[Figure]:
    if len(sources) > 1:
        results = alternate(sources, rounds)
        for (measure, system), samples in results.items():
            title = Figure(suite="start", model=model.name, measure=measure, system=system)
            base = results[_IMPORT] if system != _IMPORT[1] else None
            yield times(title, system, samples, base, Spread.beyond)


def _sources(run: Run, model: Model, *, cold: bool) -> dict[_Key, Callable[[], Fresh]]:
    """Return what is measured beside `import torch`; what begins with cold caches takes long, and is apart."""

    def start(system: System, action: str, variant: str) -> Fresh:
        return Fresh(run.spec(system, model, what="start", action=action, variant=variant), run.settings)

    sources: dict[_Key, Callable[[], Fresh]] = {_IMPORT: lambda: Fresh({"what": "start", "action": None}, run.settings)}
    for action, mode in _FIRST:
        for system in run.systems(mode):
            for variant in system.start_variants or tuple(system.load_variants)[:1]:
                if (variant == COLD) != cold:
                    continue
                label = f"{system.name}, {variant}" if system.start_variants and variant else system.name
                sources[f"first {action}", label] = partial(start, system, action, variant)
    return sources


START = Suite(
    "start",
    "from the start of a process to its first result; torch and everything else imported on the way",
    _figures,
    relative_to="beyond import torch",
    relative_as="seconds",
)
