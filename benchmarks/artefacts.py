"""What systems prepare ahead of time: once per run, in a process of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.processes import NotMeasured, Settings, Worker
from benchmarks.systems import System

_DONE = "prepared.json"
"""Beside an artefact that is whole; holds what its process answered."""


class Artefacts:
    """The artefacts of a run.

    Attributes:
        notes: what a reader of the figures must know about them.
    """

    def __init__(self, directory: Path, settings: Settings, progress: Callable[[str], None]) -> None:
        """Keep artefacts below `directory`, and take those that an earlier run has left there."""
        self.notes: list[str] = []
        self._directory = directory
        self._settings = settings
        self._progress = progress
        self._made: dict[Path, dict[str, Any] | NotMeasured] = {}

    def of(self, system: System, model: Model) -> Path:
        """Return the directory that holds the artefact; systems of one artefact share it.

        Raises:
            NotMeasured: preparing it failed, now or before.
        """
        self.preparation(system, model)
        return self._at(system, model)

    def preparation(self, system: System, model: Model) -> dict[str, Any]:
        """Return the times of preparing the artefact, once, in a process of its own.

        Raises:
            NotMeasured: preparing it failed, now or before.
        """
        directory = self._at(system, model)
        if directory not in self._made:
            self._made[directory] = self._make(system, model, directory)
        made = self._made[directory]
        if isinstance(made, NotMeasured):
            raise made
        return made

    def _at(self, system: System, model: Model) -> Path:
        return self._directory / f"{model.name}-{system.artefact}"

    def _make(self, system: System, model: Model, directory: Path) -> dict[str, Any] | NotMeasured:
        done = directory.with_name(f"{directory.name}.{_DONE}")
        if done.is_file():
            answer = json.loads(done.read_text(encoding="utf-8"))
        else:
            self._progress(f"prepare {system.artefact} of {model.name}")
            shutil.rmtree(directory, ignore_errors=True)
            spec = {"system": system.name, "model": model.name, "action": "export", "variant": "", "round_s": 0}
            try:
                with closing(Worker({**spec, "directory": str(directory)}, self._settings)) as worker:
                    answer = worker.first()
            except NotMeasured as reason:
                return reason
            done.write_text(json.dumps(answer), encoding="utf-8")
        self.notes += answer["notes"]
        return answer
