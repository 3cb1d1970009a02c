"""Processes in which functions of a test stand before those of the C library."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def preloaded(source: Path) -> Iterator[dict[str, str]]:
    """Yield an environment for processes that load the library of a C file before all others."""
    with tempfile.TemporaryDirectory(prefix="preload-") as directory:
        library = Path(directory, f"{source.stem}.so")
        subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        yield {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
