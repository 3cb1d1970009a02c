"""The comparisons of verification."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from aotexport_runtime.commands.results import VectorResult


@dataclass(frozen=True)
class Comparison:
    """One compared quantity of one recorded call, by the engine `target`: errors are the largest differences.

    `error` is relative to the largest expected magnitude. `detail` has, of other than numbers, both values.
    """

    program: str
    vector: str
    target: str
    name: str
    error: float
    absolute: float
    agrees: bool
    detail: str = ""


def comparisons(result: VectorResult) -> list[Comparison]:
    """Return the compared quantities of one result."""
    where = result.program, result.vector, result.target
    if result.error:
        return [Comparison(*where, "call", math.inf, math.inf, False, result.error)]
    shown = [f"expected {d.expected}, got {d.got}" if d.expected or d.got else "" for d in result.differences]
    pairs = zip(result.differences, shown, strict=True)
    return [Comparison(*where, d.name, d.error, d.absolute, d.agrees, detail) for d, detail in pairs]


_CALL = re.compile(r"^call \d+: ")


def failures(results: Iterable[VectorResult]) -> list[str]:
    """Return one line per quantity that differs: its first comparison, and the number of further ones."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in (c for result in results for c in comparisons(result) if not c.agrees):
        found.setdefault((comparison.program, _CALL.sub("", comparison.name)), []).append(comparison)
    return [
        f"  {first.program}/{first.vector} ({first.target}): {first.name}: "
        f"{first.detail or f'relative error {first.error:.2e}'}"
        + (f" (and in {len(others)} more comparisons)" if others else "")
        for first, *others in found.values()
    ]
