"""Measurements in the user's cache folder, kept for the next process. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cache_folder(name: str) -> Path | None:
    """Return the folder of the user's cache for files of one kind; None: the user has no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "aotexport" / name


class Measurements:
    """Results of measurements, by name; a file that cannot be used is ignored."""

    def __init__(self, folder: Path | None, facts: Sequence[Any]) -> None:
        """Use the file in `folder` for what was measured under these facts (JSON); None: keep nothing."""
        self._facts = facts
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        self._path = None if folder is None else folder / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """Return the results in the file; whoever reads them checks what they are."""
        try:
            found = None if self._path is None else json.loads(self._path.read_text())["found"]
        except (OSError, ValueError, KeyError, TypeError):
            found = None
        return found if isinstance(found, dict) else {}

    def add(self, name: str, result: Any) -> None:
        """Add a result to those of other processes; one that another writer overwrites is measured again."""
        if self._path is None:
            return
        text = json.dumps({"measured on": self._facts, "found": {**self.read(), name: result}}, indent=1)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, self._path)
