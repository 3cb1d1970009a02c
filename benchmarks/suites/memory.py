"""Private memory that a process gains by loading, beside the size of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Figure, Spread
from benchmarks.measure import Samples, alternate
from benchmarks.models import MODELS, Model
from benchmarks.processes import Fresh, NotMeasured
from benchmarks.run import Run
from benchmarks.suites.interface import Suite
from benchmarks.suites.load import labelled_variants
from benchmarks.systems import System

_MOST_ROUNDS = 1
_MODELS = ("gpt2",)


def _figures(run: Run) -> Iterator[Figure]:
    for model in run.models("memory", _MODELS):
        run.artefacts.prepare(run.systems("infer"), model)
        run.progress(f"memory: {model.name}")
        sources: dict[str, Callable[[], Fresh]] = {
            label: partial(_start, run, model, system, variant)
            for label, system, variant in labelled_variants(run.systems("infer"))
        }
        for label, samples in alternate(sources, min(run.rounds, _MOST_ROUNDS)).items():
            yield from _rows(model, label, samples)


def _start(run: Run, model: Model, system: System, variant: str) -> Fresh:
    small = str(run.artefacts.of(system, MODELS["mlp"]))
    return Fresh(run.spec(system, model, what="memory", variant=variant, small=small), run.settings)


def _rows(model: Model, label: str, samples: Samples | NotMeasured) -> Iterator[Figure]:
    if isinstance(samples, NotMeasured):
        yield Figure(suite="memory", model=model.name, measure="private", system=label, reason=str(samples))
        return
    for measure in samples[0]["nbytes"]:
        yield Figure(
            suite="memory",
            model=model.name,
            measure=measure,
            system=label,
            unit="B",
            value=Spread.of([sample["nbytes"][measure] for sample in samples]),
            relative=Spread.of([sample["nbytes"][measure] / sample["weights_nbytes"] for sample in samples]),
        )


MEMORY = Suite(
    "memory",
    "growth of a fresh process's private memory; `anonymous` is the part that has no file behind it",
    _figures,
    relative_to="of weights",
    relative_as="percent",
)
