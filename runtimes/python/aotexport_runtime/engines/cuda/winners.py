"""The fastest candidates of kernels, kept in the user's cache folder for the next process. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from aotexport_runtime.engines.user_cache import cache_folder, write_whole
from aotexport_runtime.schema.kernels import KernelBinary


def default_directory() -> Path | None:
    """Return the folder that winners are kept in by default; None: nowhere."""
    return cache_folder("tuned")


def key_of(binaries: Sequence[KernelBinary], device: str, driver: int) -> str:
    """Return the key of a winner: a digest of the code of all candidates, in order, the device and its driver.

    Args:
        binaries: code of each candidate.
        device: name of the device.
        driver: version of the driver, whose compiler makes code of PTX.
    """
    facts = [[binary.sha256 for binary in binaries], device, driver]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Winners:
    """Positions of the fastest candidates by key, one small file each; a folder that cannot be used is ignored."""

    def __init__(self, directory: Path | None) -> None:
        """Use the files in `directory`; None: keep nothing."""
        self._directory = directory

    def read(self, key: str, count: int) -> int | None:
        """Return the position that was kept, below `count`; None: there is none."""
        if self._directory is None:
            return None
        try:
            found = json.loads((self._directory / f"{key}.json").read_text())["candidate"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if type(found) is int and 0 <= found < count else None

    def write(self, key: str, position: int) -> None:
        """Keep a position."""
        if self._directory is not None:
            write_whole(self._directory / f"{key}.json", json.dumps({"candidate": position}))
