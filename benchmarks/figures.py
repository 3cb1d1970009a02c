"""Figures: a median with its spread, beside that of a baseline measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples, one per round.

    Attributes:
        median: of the samples.
        lower: a quarter of the samples are below.
        upper: a quarter of the samples are above.
        samples: in order of the rounds.
    """

    median: float
    lower: float
    upper: float
    samples: tuple[float, ...]

    @staticmethod
    def of(samples: Iterable[float]) -> Spread:
        """Return the spread of at least one sample."""
        values = tuple(samples)
        lower, median, upper = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
        return Spread(median, lower, upper, values)

    def over(self, baseline: Spread) -> Spread:
        """Return the spread of the ratios, round by round: what disturbs a whole round cancels out."""
        return Spread.of([value / base for value, base in zip(self.samples, baseline.samples, strict=True)])

    def beyond(self, baseline: Spread) -> Spread:
        """Return the spread of the differences, round by round."""
        return Spread.of([value - base for value, base in zip(self.samples, baseline.samples, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row of a table.

    Attributes:
        suite: which table.
        model: what ran.
        measure: what was measured.
        system: how it ran.
        unit: of `value`: seconds or bytes.
        value: wall time, or memory; None: not measured.
        cpu: processor time of all threads; None: not measured, or not a time.
        relative: `value` beside the baseline's, as the suite says; None: there is no baseline.
        relative_cpu: the same of `cpu`.
        relative_best: the shortest stretch of all rounds beside the baseline's shortest; None: as `relative`.
        stages: seconds of the parts of `value`.
        stages_cpu: processor seconds of the parts.
        stages_peak: the most memory that was resident until the end of each part, in bytes.
        reason: why it was not measured.
    """

    suite: str
    model: str
    measure: str
    system: str
    unit: Literal["s", "B"] = "s"
    value: Spread | None = None
    cpu: Spread | None = None
    relative: Spread | None = None
    relative_cpu: Spread | None = None
    relative_best: float | None = None
    stages: Mapping[str, Spread] = field(default_factory=dict)
    stages_cpu: Mapping[str, Spread] = field(default_factory=dict)
    stages_peak: Mapping[str, Spread] = field(default_factory=dict)
    reason: str = ""
