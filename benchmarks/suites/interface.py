"""What a suite is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures import Figure
from benchmarks.run import Run


@dataclass(frozen=True)
class Suite:
    """A set of figures that belong in one table.

    Attributes:
        name: as on the command line.
        summary: what is measured, in one line.
        figures: measures; yields figures as they become known.
        relative_to: heading of the relative values.
        relative_as: what they are.
        averaged: whether the table ends with geometric means over the models.
    """

    name: str
    summary: str
    figures: Callable[[Run], Iterator[Figure]]
    relative_to: str = "x eager"
    relative_as: Literal["ratio", "seconds", "percent"] = "ratio"
    averaged: bool = False
