"""How long an export takes, by stage, beside `torch.export.export` of the same model and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import Figure, Spread
from benchmarks.measure import Samples, alternate
from benchmarks.models import Model
from benchmarks.processes import NotMeasured, Worker
from benchmarks.run import Run, times
from benchmarks.suites.interface import Suite
from benchmarks.systems import SYSTEMS, System

_MOST_ROUNDS = 3
_BASELINE = "torch.export"
_COMPARED = ("portable",)
"""Exported round by round beside the baseline; of the others, which compile, the preparation of the run is told."""
_MEASURES = {"first": "first in its process", "again": "again"}
_ONCE = "first in its process, once"
_MODELS = ("mlp", "gpt2")


def _figures(run: Run) -> Iterator[Figure]:
    systems = {system.artefact: system for system in reversed(run.systems()) if system.exports}
    compared = [system for system in reversed(systems.values()) if system.name in _COMPARED]
    others = [system for system in reversed(systems.values()) if system.name not in _COMPARED]
    for model in run.models("export", _MODELS):
        run.progress(f"export: {model.name}")
        with TemporaryDirectory() as directory:
            sources: dict[str, Callable[[], _Twice]] = {
                system.name: partial(_Twice, run, model, system, Path(directory) / system.artefact)
                for system in (SYSTEMS[_BASELINE], *compared)
            }
            results = alternate(sources, min(run.rounds, _MOST_ROUNDS))
        for key, measure in _MEASURES.items():
            title = Figure(suite="export", model=model.name, measure=measure, system="")
            base = _only(key, results[_BASELINE])
            for system, samples in results.items():
                yield times(title, system, _only(key, samples), base, Spread.over)
        title = Figure(suite="export", model=model.name, measure=_ONCE, system="")
        for system in others:
            yield times(title, system.name, _preparation(run, system, model), None, Spread.over)


def _preparation(run: Run, system: System, model: Model) -> Samples | NotMeasured:
    try:
        return [run.artefacts.preparation(system, model)]
    except NotMeasured as reason:
        return reason


def _only(key: str, samples: Samples | NotMeasured) -> Samples | NotMeasured:
    return samples if isinstance(samples, NotMeasured) else [sample[key] for sample in samples]


class _Twice:
    """A process per sample that exports twice: the first one pays for imports and caches."""

    def __init__(self, run: Run, model: Model, system: System, directory: Path) -> None:
        names = {"system": system.name, "model": model.name, "directory": str(directory), "variant": ""}
        self._spec = {**names, "action": "export", "round_s": 0.0}
        self._settings = run.settings

    def ready(self) -> None:
        """Nothing is started before a sample is asked for."""

    def sample(self) -> dict[str, Any]:
        """Export twice."""
        with closing(Worker(self._spec, self._settings)) as worker:
            return {"first": worker.first(), "again": worker.sample()}

    def close(self) -> None:
        """Nothing is held between samples."""


EXPORT = Suite(
    "export", "from the model to the artefact; ours captures two programs and verifies them", _figures, "x torch.export"
)
