"""What systems write: bytes of files, beside those of the weights alone."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Figure, Spread
from benchmarks.models import Model
from benchmarks.processes import NotMeasured
from benchmarks.run import Run
from benchmarks.suites.interface import Suite
from benchmarks.systems import SYSTEMS, System


def _figures(run: Run) -> Iterator[Figure]:
    systems = {system.artefact: system for system in reversed(run.systems())}
    for model in run.models("size"):
        for system in reversed(systems.values()):
            try:
                weights, nbytes = _nbytes(run, SYSTEMS["eager"], model), _nbytes(run, system, model)
            except NotMeasured as reason:
                yield Figure(
                    suite="size", model=model.name, measure="files", system=system.artefact, reason=str(reason)
                )
                continue
            yield Figure(
                suite="size",
                model=model.name,
                measure="files",
                system=system.artefact,
                unit="B",
                value=Spread.of([nbytes]),
                relative=Spread.of([nbytes / weights]),
            )


def _nbytes(run: Run, system: System, model: Model) -> int:
    directory = run.artefacts.of(system, model)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


SIZE = Suite("size", "bytes of the files that a system writes", _figures, "of weights", "percent")
