"""The engines of a loaded bundle's programs, for the user to see. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from aotexport_runtime.engines.runs import EngineRun, Engines, words

_KINDS = {
    "cuda": "kernels",
    "portable": "functional graph",
    "autograd": "forward graph",
    "onnx": "ONNX Runtime",
    "openvino": "OpenVINO",
}


@dataclass(frozen=True)
class ProgramExplanation:
    """The engines of a program.

    Attributes:
        program: its name.
        device: where it runs, for ONNX Runtime its providers; empty where it does not.
        engines: names of the engines that serve its calls: `cuda`, compiled targets such as `cpu-x86_64-v3`,
            `portable`, `autograd`, `onnx`, `openvino`. Each takes those calls that the ones before it do not.
        why_not: why other engines do not serve, by name.
        has_run: the passes that have run, in the order of their first runs; None: not recorded (ONNX Runtime).
        refused: why no call is served; empty: calls are.
        because: why the functional graph serves where the forward graph could; empty: it does not, or was asked for.
    """

    program: str
    device: str = ""
    engines: tuple[str, ...] = ()
    why_not: dict[str, str] = field(default_factory=dict[str, str])
    has_run: tuple[EngineRun, ...] | None = None
    refused: str = ""
    because: str = ""

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
    """The engines of a loaded bundle's programs; as text, a few lines per program.

    Attributes:
        target: target that `load` was called with.
        programs: one per program of the bundle.
    """

    target: str
    programs: tuple[ProgramExplanation, ...]

    def __str__(self) -> str:
        return "\n".join([f"target {self.target}", *map(str, self.programs)])


def kind_of(engine: str) -> str:
    """Return the kind of code that an engine runs, in words."""
    return _KINDS.get(engine, "libraries")


def explained(engines: Engines) -> ProgramExplanation:
    """Return the current state of `engines`, for a user."""
    return ProgramExplanation(
        engines.program,
        engines.device,
        engines.serving,
        dict(engines.why_not),
        engines.runs,
        because=engines.because,
    )
