"""How export, load and call grow with the nodes of a graph, and with the bytes of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import Figure
from benchmarks.measure import Samples, alternate
from benchmarks.models import NODES, WEIGHTS, Model
from benchmarks.processes import NotMeasured, Worker
from benchmarks.run import Run, times
from benchmarks.suites.interface import Suite
from benchmarks.systems import SYSTEMS, System

_SYSTEMS = ("eager", "portable", "autograd")
_MOST_ROUNDS = 1
_MEASURES = {"export": "export", "load": "load", "train step": "first call", "again": "call"}


def _figures(run: Run) -> Iterator[Figure]:
    chosen = [SYSTEMS[name] for name in _SYSTEMS if name in run.system_names]
    for model in (*NODES[: run.scale_steps], *WEIGHTS[: run.scale_steps]):
        run.progress(f"scale: {model.name}")
        with TemporaryDirectory() as directory:
            sources: dict[str, Callable[[], _Growth]] = {
                system.name: _maker(run, model, system, Path(directory) / system.artefact) for system in chosen
            }
            results = alternate(sources, _MOST_ROUNDS)
        for key, measure in _MEASURES.items():
            title = Figure(suite="scale", model=model.name, measure=measure, system="")
            base = _only(key, results.get("eager"))
            for name, samples in results.items():
                if measure != "export" or SYSTEMS[name].exports:
                    yield times(title, name, _only(key, samples) or NotMeasured("no sample"), base, _ratio)


def _ratio(value: Any, base: Any) -> Any:
    return value.over(base)


def _only(key: str, samples: Samples | NotMeasured | None) -> Samples | NotMeasured | None:
    if samples is None or isinstance(samples, NotMeasured):
        return samples
    return [sample[key] for sample in samples if key in sample]


def _maker(run: Run, model: Model, system: System, directory: Path) -> Callable[[], _Growth]:
    return lambda: _Growth(run, model, system, directory)


class _Growth:
    """Processes that export, load and call, each once and then again."""

    def __init__(self, run: Run, model: Model, system: System, directory: Path) -> None:
        variant = next(iter(system.load_variants))
        self._spec = {"system": system.name, "model": model.name, "directory": str(directory), "variant": variant}
        self._threads = run.threads

    def sample(self) -> dict[str, Any]:
        """Export, load and call."""
        found: dict[str, Any] = {}
        for action in ("export", "load", "train step"):
            worker = Worker({**self._spec, "action": action, "round_s": 0.0}, self._threads)
            try:
                found[action] = worker.first
                if action == "train step":
                    found["again"] = worker.sample()
            finally:
                worker.close()
        return found

    def close(self) -> None:
        """Nothing is held between samples."""


SCALE = Suite("scale", "one execution each, in a process of its own; the first call generates code", _figures)
