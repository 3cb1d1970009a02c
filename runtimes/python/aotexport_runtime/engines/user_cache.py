"""Small files of measurements in the user's cache folder, for the next process. No torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return the folder of the user's cache for files of one kind; None: the user has no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "aotexport" / name


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically; ignore a file system that refuses."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
