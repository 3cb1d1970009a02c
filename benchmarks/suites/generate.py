"""Tokens, one after the other: the runtime's loop over a bundle beside that of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Figure
from benchmarks.models import Model
from benchmarks.processes import Worker
from benchmarks.run import Run
from benchmarks.suites.interface import Suite
from benchmarks.suites.steps import Checked
from benchmarks.systems import System
from benchmarks.systems.generation import DYNAMIC_CACHE, NEW_TOKENS

_SAME = 1e-12


def _figures(run: Run) -> Iterator[Figure]:
    for model in run.models("generate", ()):
        yield from _compare(run, model)


def _compare(run: Run, model: Model) -> list[Figure]:
    found: dict[str, float] = {}

    def start(system: System) -> Checked:
        spec = run.spec(system, model, action="inference")
        return Checked(spec, run.settings, found, _SAME, baseline=DYNAMIC_CACHE.name)

    systems = run.systems("generate")
    run.artefacts.prepare(systems, model)
    sources: dict[str, Callable[[], Worker]] = {system.name: partial(start, system) for system in systems}
    title = Figure(suite="generate", model=model.name, measure=f"{NEW_TOKENS} tokens", system="")
    return run.compare(title, sources, baseline=DYNAMIC_CACHE.name)


GENERATE = Suite(
    "generate",
    f"greedy generation of {NEW_TOKENS} tokens; all systems generate the same",
    _figures,
    relative_to="x dynamic cache",
)
