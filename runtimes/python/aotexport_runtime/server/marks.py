"""What clients told one worker, for the others."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from aotexport_runtime.errors import AotExportError

if TYPE_CHECKING:
    from aotexport_runtime.server.repository import Repository


class Marks:
    """The models that clients told one worker to unload, for the others: an empty file per model in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def _mark(self, model: str) -> Path:
        return self._directory / quote(model, safe="")

    def set(self, model: str, *, unloaded: bool) -> None:
        """Note that a model was unloaded, or loaded again, here; other workers follow before they answer for it."""
        if unloaded:
            self._mark(model).touch()
            self._known.add(model)
        else:
            self._mark(model).unlink(missing_ok=True)
            self._known.discard(model)

    def is_behind(self, model: str) -> bool:
        """Return whether another worker was told something about a model that this one has not followed."""
        return os.path.exists(self._mark(model)) != (model in self._known)

    def follow(self, repository: Repository) -> None:
        """Do what other workers were told since the last look."""
        with self._lock:
            marked = {unquote(mark.name) for mark in self._directory.iterdir()}
            for model in marked - self._known:
                if model in repository.models:
                    repository.unload(model)
                self._known.add(model)
            for model in self._known - marked:
                with contextlib.suppress(AotExportError):  # in the log, and in the index
                    repository.load(model)
                self._known.discard(model)
