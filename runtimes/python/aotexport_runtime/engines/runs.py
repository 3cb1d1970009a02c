"""The engines of a program: which serve its calls, why others do not, which passes have run; for users. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aotexport_runtime.engines.candidates import is_native, is_of
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


_KINDS = {
    "cuda": "kernels",
    "portable": "functional graph",
    "packed": "functional graph with packed weights",
    "autograd": "forward graph",
    "onnx": "ONNX Runtime",
    "openvino": "OpenVINO",
}


@dataclass
class Engines:
    """The engines of a program, and the passes that they have run.

    Attributes:
        device: where it runs, for ONNX Runtime its providers; empty where it does not.
        engines: names of the engines that serve its calls: `cuda`, compiled targets such as `cpu-x86_64-v3`,
            `portable`, `packed`, `autograd`, `onnx`, `openvino`. Each takes those calls that the ones before it do not.
        why_not: why other engines do not serve, by name.
        has_run: the passes that have run, in the order of their first runs; None: not recorded (ONNX Runtime).
        refused: why no call is served; empty: calls are.
        because: why the functional graph serves where the forward graph could; empty: it does not, or was asked for.
    """

    program: str
    device: str = ""
    engines: tuple[str, ...] = ()
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])
    has_run: tuple[EngineRun, ...] | None = None
    refused: str = ""
    because: str = ""

    def ran(self, passes: str, engine: str, because: str = "") -> None:
        """Record that an engine runs a pass; log it the first time."""
        runs = self.has_run or ()
        if not any((run.passes, run.engine) == (passes, engine) for run in runs):
            self.has_run = (*runs, EngineRun(passes, engine, because))
            log.info("program %s runs %s", self.program, self.has_run[-1])

    def measured(
        self, engines: Sequence[str], seconds: Mapping[str, float], why_not: Mapping[str, str], told: str
    ) -> None:
        """Record which engines serve, the fastest first, the time of a call by engine, and why others have none.

        `told`: what else there is to say of the first.
        """
        first = engines[0]
        self.has_run = tuple(run for run in self.has_run or () if run.engine == first)
        words = {name: f"{each * 1e3:.3g} ms" for name, each in sorted(seconds.items(), key=lambda pair: pair[1])}
        others = ", ".join(f"{name} {each}" for name, each in words.items() if name != first)
        self.because = f"measured here: {words[first]} a call; {others or 'no other engine serves it'}{told}"
        slower = {name: f"measured: {each} a call" for name, each in words.items()}
        reasons = {**self.why_not, **slower, **why_not}
        self.why_not = {name: reason for name, reason in reasons.items() if name not in engines}
        self.engines = tuple(engines)

    def demand(self, target: str) -> None:
        """Refuse the program if `target` is native code that does not serve it.

        Raises:
            NotSupported: says why.
        """
        if not is_native(target) or any(is_of(engine, target) for engine in self.engines):
            return
        reasons = [f"{name}: {reason}" for name, reason in self.why_not.items() if is_of(name, target)]
        said = "; ".join(reasons) or f"the bundle has none of it for program `{self.program}`"
        raise NotSupported(
            f"target `{target}` was asked for and does not run program `{self.program}` on {self.device}: {said}. "
            "Target `auto` runs the fastest of those that do"
        )

    def __str__(self) -> str:
        if self.refused:
            return f"program {self.program}: refused: {self.refused}"
        engines = ", else ".join(f"{name} ({kind_of(name)})" for name in self.engines)
        lines = [f"program {self.program} on {self.device}: {engines}"]
        lines += [f"  {self.engines[0]}: {self.because}"] if self.because else []
        lines += [f"  not {name}: {reason}" for name, reason in self.why_not.items()]
        if self.has_run is not None:
            lines.append(f"  has run: {words(self.has_run) or 'nothing'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The engines of a loaded bundle's programs, and the `target` of `load`; as text, a few lines per program."""

    target: str
    programs: tuple[Engines, ...]

    def __str__(self) -> str:
        return "\n".join([f"target {self.target}", *map(str, self.programs)])


def kind_of(engine: str) -> str:
    """Return the kind of code that an engine runs, in words."""
    return _KINDS.get(engine, "libraries")
