"""The comparisons of verification, and the report of an export, as a record that prints as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from aotexport_runtime.bundle.notes import BundleNote
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.schema.manifest import Manifest

if TYPE_CHECKING:
    from aotexport.encode.program import EncodedProgram


@dataclass(repr=False)
class ExportReport:
    """The report of an export; printed, it is some lines of text.

    Attributes:
        path: directory of the bundle.
        manifest: its manifest.
        programs: its programs, as encoded.
        comparisons: verified values with their errors; empty without verification.
        seconds: wall time per stage.
        notes: restrictions on calls, needs of a load, and effects that the bundle lacks; each reads as a sentence.
    """

    path: Path
    manifest: Manifest
    programs: list[EncodedProgram]
    comparisons: list[Comparison] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[BundleNote] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return what the command prints: contents of the bundle, largest errors, notes, and time."""
        from aotexport.verify.summary import as_text, of_command, summarize

        return as_text(of_command(summarize(self, verified=bool(self.comparisons)), self.path, self.seconds))


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
