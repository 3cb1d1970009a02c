"""What a system is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.models import Model

Mode = Literal["train", "infer", "generate", "step"]


@dataclass(frozen=True)
class Prepared:
    """What preparing did.

    Attributes:
        stages: seconds per stage; empty when the system tells none.
        notes: sentences that a reader of the figures must know.
        stages_cpu: processor seconds per stage.
        stages_peak: the most memory that was resident until the end of each stage, in bytes.
    """

    stages: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stages_cpu: dict[str, float] = field(default_factory=dict)
    stages_peak: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A way to run a model. Its functions import what they need when called, and nothing else does.

    Attributes:
        name: as on the command line.
        summary: one line for a person to read.
        artefact: names what `prepare` writes; systems of one artefact share it.
        prepare: writes the artefact of a model to a directory of its own, replacing an earlier one.
        load: returns the callable module of a mode, from the artefact in the directory; None: it only prepares.
        exports: whether `prepare` is what a user of the system does to export a model.
        modes: what it can do.
        load_variants: keyword arguments for `load`, by name; the first is the default.
        start_variants: the variants that fresh processes are measured with; empty: the default.
    """

    name: str
    summary: str
    artefact: str
    prepare: Callable[[Model, Path], Prepared]
    load: Callable[..., Callable[..., Any]] | None = None
    exports: bool = True
    modes: frozenset[Mode] = frozenset({"train", "infer"})
    load_variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    start_variants: tuple[str, ...] = ()
