"""The matmul backend that a caller of `load` chooses."""

from __future__ import annotations

import os
from typing import Literal

from aotexport_runtime.errors import NotSupported

Mode = Literal["fastest", "onednn", "torch"]
VARIABLE = "AOTEXPORT_MATMUL"
"""Environment variable with the mode of calls that name none."""

_LEAST_SIZE = 16
_LEAST_WORK = 1 << 21
"""Least multiplications of a matmul that is worth measuring: below, oneDNN's fixed cost dominates."""


def mode_of(name: str | None) -> Mode:
    """Return the mode that the caller, or else the environment, names.

    Raises:
        NotSupported: there is none of that name.
    """
    chosen = os.environ.get(VARIABLE, "fastest") if name is None else name
    if chosen not in ("fastest", "onednn", "torch"):
        asked = f"environment variable {VARIABLE} asks for the" if name is None else "no"
        raise NotSupported(f"{asked} `{chosen}` matmul backend; there are fastest, onednn, torch")
    return chosen


def is_worth_choosing(mode: Mode, rows: int, depth: int, columns: int) -> bool:
    """Return whether a matmul of these sizes may go to oneDNN."""
    least, work = (_LEAST_SIZE, _LEAST_WORK) if mode == "fastest" else (2, 0)
    return mode != "torch" and min(rows, depth, columns) >= least and rows * depth * columns >= work
