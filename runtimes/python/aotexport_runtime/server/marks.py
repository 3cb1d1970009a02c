"""What clients told one worker to unload, for the others: an empty file per model, in a directory of the server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote

from aotexport_runtime.errors import AotExportError
from aotexport_runtime.server.repository import Repository


class Marks:
    """The models that are unloaded in every worker."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[str] = set()

    def set(self, model: str, *, unloaded: bool) -> None:
        """Note that a model was unloaded, or loaded again, here; the other workers follow at their next look."""
        mark = self._directory / quote(model, safe="")
        if unloaded:
            mark.touch()
            self._known.add(model)
        else:
            mark.unlink(missing_ok=True)
            self._known.discard(model)

    def follow(self, repository: Repository) -> None:
        """Do what other workers were told since the last look."""
        marked = {unquote(mark.name) for mark in self._directory.iterdir()}
        for model in marked - self._known:
            if model in repository.models:
                repository.unload(model)
        for model in self._known - marked:
            try:
                repository.load(model)
            except AotExportError:  # in the log, and in the index
                continue
        self._known = marked
