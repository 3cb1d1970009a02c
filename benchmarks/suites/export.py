"""What an export takes, by stage: wall time, processor time and memory, beside other exporters of the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
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
_TRACES = "torch's traces"
_COMPARED = ("portable", "ONNX Runtime", "AOTInductor")
"""Exported round by round beside the baseline; of the others, which compile, the preparation of the run is told."""
_ONCE = "first in its process, once"
_MODELS = ("mlp", "gpt2")


def _figures(run: Run) -> Iterator[Figure]:
    systems = {system.artefact: system for system in reversed(run.systems()) if system.exports}
    torchs = [SYSTEMS[name] for name in (_BASELINE, _TRACES) if name in (_BASELINE, *run.system_names)]
    compared = [*torchs, *(system for system in reversed(systems.values()) if system.name in _COMPARED)]
    others = [system for system in reversed(systems.values()) if system.name not in _COMPARED]
    for model in run.models("export", _MODELS):
        for sizes, threads in _ways(run, model):
            own = replace(run, settings=replace(run.settings, threads=threads))
            yield from _compared(own, model, sizes, compared)
        title = Figure(suite="export", model=model.name, measure=_ONCE, system="")
        for system in others:
            yield times(title, system.name, _preparation(run, system, model), None, Spread.over)


def _ways(run: Run, model: Model) -> list[tuple[str, int]]:
    """Return the sizes and threads to export a model with; a run that names no models takes the first alone."""
    sizes = ["static"] if model.sizes is None else ["dynamic", "static"]
    ways = [(each, threads) for each in sizes for threads in dict.fromkeys((1, run.settings.threads))]
    return ways[:1] if run.model_names is None else ways


def _compared(run: Run, model: Model, sizes: str, systems: list[System]) -> Iterator[Figure]:
    way = f"{sizes} sizes, {run.settings.threads} thread{'s' * (run.settings.threads > 1)}"
    run.progress(f"export: {model.name}, {way}")
    with TemporaryDirectory() as directory:
        sources: dict[str, Callable[[], _Twice]] = {
            system.name: partial(_Twice, run, model, system, Path(directory) / system.artefact, sizes)
            for system in systems
        }
        results = alternate(sources, min(run.rounds, _MOST_ROUNDS))
    for key, measure in (("first", "first in its process"), ("again", "again")):
        title = Figure(suite="export", model=model.name, measure=f"{measure}, {way}", system="")
        base = _only(key, results[_BASELINE])
        for system, samples in results.items():
            yield times(title, system, _only(key, samples), base, Spread.over)
    for system, samples in results.items():
        if not isinstance(samples, NotMeasured):
            title = Figure(suite="export", model=model.name, measure=f"peak memory, {way}", system=system, unit="B")
            yield replace(title, value=Spread.of([sample["first"]["peak_nbytes"] for sample in samples]))


def _preparation(run: Run, system: System, model: Model) -> Samples | NotMeasured:
    try:
        return [run.artefacts.preparation(system, model)]
    except NotMeasured as reason:
        return reason


def _only(key: str, samples: Samples | NotMeasured) -> Samples | NotMeasured:
    return samples if isinstance(samples, NotMeasured) else [sample[key] for sample in samples]


class _Twice:
    """A process per sample that exports twice: the first one pays for imports and caches."""

    def __init__(self, run: Run, model: Model, system: System, directory: Path, sizes: str) -> None:
        names = {"system": system.name, "model": model.name, "variant": ""}
        self._spec = {**names, "action": "export", "round_s": 0.0, "dynamic": sizes == "dynamic"}
        self._settings = run.settings
        self._directory = directory

    def ready(self) -> None:
        """Nothing is started before a sample is asked for."""

    def sample(self) -> dict[str, Any]:
        """Export twice, with the caches on disk that the first time leaves."""
        self._directory.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=self._directory) as directory:
            spec = {**self._spec, "directory": str(Path(directory) / "artefact")}
            with closing(Worker(spec, self._settings)) as worker:
                return {"first": worker.first(), "again": worker.sample()}

    def close(self) -> None:
        """Nothing is held between samples."""


EXPORT = Suite(
    "export", "from the model to the artefact; ours captures two programs and verifies them", _figures, "x torch.export"
)
