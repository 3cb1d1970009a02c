"""How export, load and call grow with the nodes of a graph, and with the bytes of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import Figure, Spread
from benchmarks.measure import Samples
from benchmarks.models import NODES, WEIGHTS, Model
from benchmarks.processes import NotMeasured, Worker
from benchmarks.run import Run, times
from benchmarks.suites.interface import Suite
from benchmarks.systems import SYSTEMS, System

_SYSTEMS = ("eager", "portable", "autograd", "torch.export")
_ACTIONS = ("export", "load", "train step")
_MEASURES = {"export": "export", "load": "load", "train step": "first call", "again": "call"}
_PEAKS = {"export": "export, peak memory", "train step": "first call, peak memory"}


def _figures(run: Run) -> Iterator[Figure]:
    chosen = [SYSTEMS[name] for name in _SYSTEMS if name in run.system_names or SYSTEMS[name].load is None]
    for model in (*NODES[: run.scale_steps], *WEIGHTS[: max(1, run.scale_steps - 1)]):
        with TemporaryDirectory() as directory:
            found = {system.name: _grow(run, model, system, Path(directory)) for system in chosen}
        for key, measure in _MEASURES.items():
            title = Figure(suite="scale", model=model.name, measure=measure, system="")
            base = found.get("eager", {}).get(key)
            for name, samples in found.items():
                if key in samples:
                    yield times(title, name, samples[key], base, Spread.over)
        yield from (figure for name, samples in found.items() for figure in _peaks(model, name, samples))


def _grow(run: Run, model: Model, system: System, directory: Path) -> dict[str, Samples | NotMeasured]:
    """Export, load and call, each in a process of its own; the call again. Systems of one artefact export once."""
    artefact = directory / system.artefact
    variant = next(iter(system.load_variants))
    spec = {"system": system.name, "model": model.name, "directory": str(artefact), "variant": variant}
    found: dict[str, Samples | NotMeasured] = {}
    for action in _ACTIONS if system.load is not None else _ACTIONS[:1]:
        if action == "export" and artefact.exists():
            continue
        run.progress(f"scale: {model.name}, {action}, {system.name}")
        try:
            with closing(Worker({**spec, "action": action, "round_s": 0.0}, run.settings)) as worker:
                found[action] = [worker.first()]
                if action == "train step":
                    found["again"] = [worker.sample()]
        except NotMeasured as reason:
            found.setdefault("again" if action in found else action, reason)
    if not system.exports:
        found.pop("export", None)
    return found


def _peaks(model: Model, name: str, found: dict[str, Samples | NotMeasured]) -> Iterator[Figure]:
    """Yield the largest resident memory of the processes that did it."""
    for key, measure in _PEAKS.items():
        samples = found.get(key)
        if isinstance(samples, list):
            value = Spread.of([sample["peak_nbytes"] for sample in samples])
            yield Figure(suite="scale", model=model.name, measure=measure, system=name, unit="B", value=value)


SCALE = Suite("scale", "one execution each, in a process of its own; the first call generates code", _figures)
