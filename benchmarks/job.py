"""What a process of a run is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.systems import System
from benchmarks.systems.interface import Mode


@dataclass(frozen=True)
class Job:
    """What a process is asked to do.

    Attributes:
        system: what to run.
        model: on what.
        directory: holds the system's artefact of the model.
        variant: how to load it, by name.
    """

    system: System
    model: Model
    directory: Path
    variant: str

    def load(self, mode: Mode) -> Callable[..., Any]:
        """Return the module, ready to be called in `mode`."""
        assert self.system.load is not None
        return self.system.load(self.model, self.directory, mode, **self.system.load_variants[self.variant])
