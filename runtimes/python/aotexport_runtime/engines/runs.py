"""The engines of a program: which serve its calls, why others do not, and which passes have run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aotexport_runtime.engines.candidates import is_native, is_of
from aotexport_runtime.engines.select import Choice
from aotexport_runtime.errors import NotSupported

log = logging.getLogger("aotexport_runtime")

LIBRARY_FAILED = "the library left the call to the graph: for an index outside of its bounds, or a failure in the log"

WHOLE = "forward and backward"
"""The passes of a forward graph: torch's autograd records the backward as the forward runs."""


@dataclass(frozen=True)
class EngineRun:
    """A pass of a program that has run.

    Attributes:
        passes: `forward`, `backward`, or `forward and backward` of a forward graph under autograd.
        engine: the name of its engine, such as `cpu-x86_64-v3`.
        because: why no faster engine of the program did, the first time; empty where this is the fastest.
    """

    passes: str
    engine: str
    because: str = ""

    def __str__(self) -> str:
        return f"{self.passes} by {self.engine}" + (f" ({self.because})" if self.because else "")


def words(runs: Iterable[EngineRun]) -> str:
    """Return runs in words: `forward and backward by portable`."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        found.setdefault((run.engine, run.because), []).append(run.passes)
    return "; ".join(str(EngineRun(" and ".join(passes), *key)) for key, passes in found.items())


class Engines:
    """The engines of one program.

    Attributes:
        program: its name.
        device: where it runs.
        serving: names of the engines that serve its calls; each takes those that the ones before it do not.
        why_not: why others do not serve, by name.
        because: why the first engine serves where others could; empty: none could, or it was asked for.
    """

    def __init__(self, program: str, device: str, choice: Choice) -> None:
        """Prepare a program that has not run yet."""
        self.program = program
        self.device = device
        self.serving = choice.engines
        self.why_not = choice.why_not
        self.because = choice.because
        self._runs: dict[tuple[str, str], EngineRun] = {}

    @property
    def runs(self) -> tuple[EngineRun, ...]:
        """The passes that have run, in the order of their first runs."""
        return tuple(self._runs.values())

    def ran(self, passes: str, engine: str, because: str = "") -> None:
        """Record that an engine runs a pass; log it the first time."""
        if (passes, engine) not in self._runs:
            self._runs[passes, engine] = run = EngineRun(passes, engine, because)
            log.info("program %s runs %s", self.program, run)

    def measured(
        self, engines: Sequence[str], because: str, seconds: Mapping[str, float], why_not: Mapping[str, str]
    ) -> None:
        """Record which engines serve, the fastest first, by figures; see `Figures` of `module/measured.py`."""
        self.serving, self.because = tuple(engines), because
        self._runs = {key: run for key, run in self._runs.items() if run.engine == engines[0]}
        slower = {name: f"measured: {each * 1e3:.3g} ms a call" for name, each in seconds.items()}
        reasons = {**self.why_not, **slower, **why_not}
        self.why_not = {name: reason for name, reason in reasons.items() if name not in engines}

    def demand(self, target: str) -> None:
        """Refuse the program if `target` is native code that does not serve it.

        Raises:
            NotSupported: says why.
        """
        if not is_native(target) or any(is_of(engine, target) for engine in self.serving):
            return
        reasons = [f"{name}: {reason}" for name, reason in self.why_not.items() if is_of(name, target)]
        said = "; ".join(reasons) or f"the bundle has none of it for program `{self.program}`"
        raise NotSupported(
            f"target `{target}` was asked for and does not run program `{self.program}` on {self.device}: {said}. "
            "Target `auto` runs the fastest of those that do"
        )
