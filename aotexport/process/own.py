"""A process that the command line has to itself: it can begin again, and knows all that it has read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aotexport.process.opened_files import OpenedFiles


def is_own() -> bool:
    """Return whether this process was started as `aotexport` or `python -m aotexport`, and has not imported torch."""
    program = Path(sys.argv[0])
    named = program.name == "aotexport" or program.parts[-2:] == ("aotexport", "__main__.py")
    return named and "torch" not in sys.modules and sys.platform != "win32"


def watched() -> OpenedFiles:
    """Return the files that this process opens from now on; begin the process again if its hashes are random.

    Libraries make lists of sets of strings, whose order is another in each process then: two equal models would differ.
    """
    if sys.flags.hash_randomization and "PYTHONHASHSEED" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    return OpenedFiles()
