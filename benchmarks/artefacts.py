"""What systems prepare ahead of time: once per run, in a process of its own, to a directory that goes with the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.models import Model
from benchmarks.processes import NotMeasured, Worker
from benchmarks.systems import System


class Artefacts:
    """The artefacts of a run.

    Attributes:
        notes: what a reader of the figures must know about them.
    """

    def __init__(self, directory: Path, threads: int, progress: Callable[[str], None]) -> None:
        """Keep artefacts below `directory`."""
        self.notes: list[str] = []
        self._directory = directory
        self._threads = threads
        self._progress = progress
        self._made: dict[Path, NotMeasured | None] = {}

    def of(self, system: System, model: Model) -> Path:
        """Return the directory that holds the artefact; systems of one artefact share it.

        Raises:
            NotMeasured: preparing it failed, now or before.
        """
        directory = self._directory / f"{model.name}-{system.artefact}"
        if directory not in self._made:
            self._progress(f"prepare {system.artefact} of {model.name}")
            self._made[directory] = self._make(system, model, directory)
        reason = self._made[directory]
        if reason is not None:
            raise reason
        return directory

    def _make(self, system: System, model: Model, directory: Path) -> NotMeasured | None:
        spec = {"system": system.name, "model": model.name, "action": "export", "variant": "", "round_s": 0}
        try:
            worker = Worker({**spec, "directory": str(directory)}, self._threads)
        except NotMeasured as reason:
            return reason
        self.notes += worker.first["notes"]
        worker.close()
        return None
