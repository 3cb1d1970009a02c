"""Levels of the x86-64 instruction set that a target's libraries may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LevelName = Literal["x86_64-v3", "x86_64-v4"]


@dataclass(frozen=True)
class Level:
    """A level: its name in the bundle and for the C++ compiler (`march`), and the width of its vector registers."""

    name: LevelName
    march: str
    vector_nbits: int

    @property
    def target(self) -> str:
        """Name of the target of this level."""
        return f"cpu-{self.name}"


LEVELS = {
    "v3": Level(name="x86_64-v3", march="x86-64-v3", vector_nbits=256),
    "v4": Level(name="x86_64-v4", march="x86-64-v4", vector_nbits=512),
}
"""Levels by short name, lowest first."""


def own_level() -> Level | None:
    """Return the highest level that this machine has; None: none of them."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return LEVELS["v4"]
    return LEVELS["v3"] if capability.startswith("AVX2") else None
