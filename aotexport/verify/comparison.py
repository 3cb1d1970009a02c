"""The comparisons of verification: a quantity of a recorded call, by eager and by the bundle."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"^call \d+: ")


@dataclass(frozen=True)
class Comparison:
    """One compared quantity of one recorded call, by the engine `target`.

    Attributes:
        error: largest difference, relative to the largest expected magnitude.
        absolute: largest absolute difference.
        agrees: whether it is within tolerance.
        detail: for other than numbers: eager's value and the bundle's.
    """

    program: str
    vector: str
    target: str
    name: str
    error: float
    absolute: float
    agrees: bool
    detail: str = ""


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """Return the compared quantities of one result."""
    base = {key: result[key] for key in ("program", "vector", "target")}
    if result["error"]:
        return [
            Comparison(**base, name="call", error=math.inf, absolute=math.inf, agrees=False, detail=result["error"])
        ]
    return [
        Comparison(
            **base,
            name=d["name"],
            error=d["error"],
            absolute=d["absolute"],
            agrees=d["agrees"],
            detail=f"expected {d['expected']}, got {d['got']}" if d["expected"] or d["got"] else "",
        )
        for d in result["differences"]
    ]


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
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
