"""How long loading takes in a process that has imported everything, in every way that a system can load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Figure
from benchmarks.models import Model
from benchmarks.processes import Worker
from benchmarks.run import Run
from benchmarks.suites.interface import Suite
from benchmarks.systems import System
from benchmarks.systems.torch_compile import COLD

_MOST_ROUNDS = 5
_MODELS = ("gpt2",)


def _figures(run: Run) -> Iterator[Figure]:
    for model in run.models("load", _MODELS):
        run.artefacts.prepare(run.systems(), model)
        title = Figure(suite="load", model=model.name, measure="load", system="")
        sources: dict[str, Callable[[], Worker]] = {
            label: partial(_start, run, model, system, variant)
            for label, system, variant in labelled_variants(run.systems())
        }
        yield from run.compare(title, sources, rounds=min(run.rounds, _MOST_ROUNDS))


def _start(run: Run, model: Model, system: System, variant: str) -> Worker:
    return Worker(run.spec(system, model, action="load", variant=variant), run.settings)


def labelled_variants(systems: list[System]) -> Iterator[tuple[str, System, str]]:
    """Yield every way to load, with a label for the table; of systems that share an artefact, the first's."""
    artefacts: set[str] = set()
    for system in systems:
        if system.artefact in artefacts:
            continue
        artefacts.add(system.artefact)
        for variant in system.load_variants:
            if variant == COLD:
                continue  # differs in the first call alone
            yield f"{system.name}, {variant}" if variant else system.name, system, variant


LOAD = Suite(
    "load", "from the files to a module, everything imported; eager builds its module and reads the weights", _figures
)
