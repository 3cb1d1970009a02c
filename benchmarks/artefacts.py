"""What systems prepare ahead of time: once per run, in a process of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.processes import NotMeasured, Settings, Worker
from benchmarks.systems import System

_DONE = "prepared.json"
"""Beside an artefact that is whole; holds what its process answered."""
_SIDE_BY_SIDE = 2
"""How many artefacts are prepared at a time: most of it runs on one core."""


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

    def prepare(self, systems: Iterable[System], model: Model) -> None:
        """Prepare the artefacts that are missing, side by side; `of` tells what failed."""
        wanted = {self._at(system, model): system for system in reversed(tuple(systems))}
        begun: dict[Path, Worker] = {}
        with ExitStack() as stack:
            for directory, system in reversed(wanted.items()):
                if directory in self._made or self._found(directory):
                    continue
                if len(begun) == _SIDE_BY_SIDE:
                    oldest = next(iter(begun))
                    self._finish(oldest, begun.pop(oldest))
                try:
                    begun[directory] = stack.enter_context(closing(self._begin(system, model, directory)))
                except NotMeasured as reason:
                    self._made[directory] = reason
            for directory, worker in begun.items():
                self._finish(directory, worker)

    def of(self, system: System, model: Model) -> Path:
        """Return the directory that holds the artefact; systems of one artefact share it.

        Raises:
            NotMeasured: preparing it failed, now or before.
        """
        self.preparation(system, model)
        return self._at(system, model)

    def preparation(self, system: System, model: Model) -> dict[str, Any]:
        """Return the times of preparing the artefact, once, in a process of its own, perhaps beside another.

        Raises:
            NotMeasured: preparing it failed, now or before.
        """
        self.prepare((system,), model)
        made = self._made[self._at(system, model)]
        if isinstance(made, NotMeasured):
            raise made
        return made

    def _at(self, system: System, model: Model) -> Path:
        return self._directory / f"{model.name}-{system.artefact}"

    def _found(self, directory: Path) -> bool:
        """Take what an earlier run has left, if it has."""
        done = _done(directory)
        if done.is_file():
            self._take(directory, json.loads(done.read_text(encoding="utf-8")))
        return done.is_file()

    def _begin(self, system: System, model: Model, directory: Path) -> Worker:
        self._progress(f"prepare {system.artefact} of {model.name}")
        shutil.rmtree(directory, ignore_errors=True)
        spec = {"system": system.name, "model": model.name, "action": "export", "variant": "", "round_s": 0}
        return Worker({**spec, "directory": str(directory)}, self._settings)

    def _finish(self, directory: Path, worker: Worker) -> None:
        try:
            answer = worker.first()
        except NotMeasured as reason:
            self._made[directory] = reason
            return
        finally:
            worker.close()
        _done(directory).write_text(json.dumps(answer), encoding="utf-8")
        self._take(directory, answer)

    def _take(self, directory: Path, answer: dict[str, Any]) -> None:
        self._made[directory] = answer
        self.notes += [note for note in answer["notes"] if note not in self.notes]


def _done(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.{_DONE}")
