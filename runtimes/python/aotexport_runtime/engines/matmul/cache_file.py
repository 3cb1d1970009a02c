"""The file that keeps the faster library per matmul, for the next process on such a machine. No torch."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

from aotexport_runtime.engines.user_cache import write_whole


def processor() -> str:
    """Return the identity of this machine's processor: vendor, family, model, stepping."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict([part.strip() for part in line.partition(":")[::2]] for line in lines)
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    return ", ".join(facts[name] for name in names if name in facts) or platform.machine()


class CacheFile:
    """Whether oneDNN was clearly faster, by matmul; a file that cannot be used is ignored."""

    def __init__(self, folder: Path | None, torch_version: str, threads: int) -> None:
        """Use the file in `folder` for this processor, torch, and number of threads; None: keep nothing."""
        self._facts = [processor(), torch_version, threads]
        name = hashlib.sha256(json.dumps(self._facts).encode()).hexdigest()[:32]
        self._path = None if folder is None else folder / f"{name}.json"

    def read(self) -> dict[str, bool]:
        """Return the results in the file, by matmul."""
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text())["faster"]
            return {str(key): value for key, value in found.items() if type(value) is bool}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def add(self, matmul: str, faster: bool) -> None:
        """Add a result to those of other processes; one that another writer overwrites is measured again."""
        if self._path is not None:
            record = {"measured on": self._facts, "faster": {**self.read(), matmul: faster}}
            write_whole(self._path, json.dumps(record, indent=1))
