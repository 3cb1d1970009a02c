"""The facts that rules choose an engine by: the request, the bundle, the program, the machine. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines import figures
from aotexport_runtime.execution.matmul.sizes import Matmul
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program

CUDA, PORTABLE, AUTOGRAD, ONNX, OPENVINO = "cuda", "portable", "autograd", "onnx", "openvino"
"""Names of the engines that run kernels, functional graphs, forward graphs, and ONNX models by ONNX Runtime and by
OpenVINO; compiled targets are `cpu-LEVEL`."""

MODEL_ENGINES = (ONNX, OPENVINO)
"""Those that run ONNX models."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `load` that choose an engine; see there."""

    target: str = "auto"
    trust: str = "data"
    memory_budget: float = 1
    frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineCandidate:
    """An engine, with the facts that may rule it out."""

    engine: str
    bundle: Bundle
    request: Request
    serving: Sequence[str]
    device: str | None

    @property
    def kind(self) -> str:
        """Name of the engine without a level: `cpu` for `cpu-x86_64-v3`."""
        return self.engine.partition("-")[0]

    @property
    def is_for_another_target(self) -> bool:
        """Whether the caller asked for another engine."""
        return self.request.target not in ("auto", self.kind, self.engine)

    @property
    def is_off_processors(self) -> bool:
        """Whether the device is no processor."""
        return self.device not in (None, "cpu")


@dataclass(frozen=True, kw_only=True)
class TargetOfBundle(EngineCandidate):
    """Native code of a bundle, for all programs that it has."""

    why_unfit: Callable[[str], str | None]

    @property
    def unfit(self) -> str | None:
        """Why this machine does not run the code; None: it does."""
        return self.why_unfit(self.engine)

    @property
    def has_kernels(self) -> bool:
        """Whether a program of the bundle has GPU kernels."""
        return any(CUDA in entry.targets for entry in self.bundle.manifest.programs)

    @property
    def higher_level(self) -> str | None:
        """The compiled target that serves so far; None: none does."""
        return next((name for name in self.serving if name != CUDA), None)


@dataclass(frozen=True, kw_only=True)
class EngineOfProgram(EngineCandidate):
    """An engine for one program."""

    program: Program
    changed: str
    failed: str | None
    is_measured: bool
    prefers_onednn: Callable[[Matmul], bool] | None

    @property
    def no_functional(self) -> str | None:
        """Why the program has no functional graph; None: it has one."""
        if self.program.functional is not None:
            return None
        return "; ".join(refusal.reason for refusal in self.program.refusals)

    @property
    def not_compiled(self) -> str | None:
        """Why the target has no library of the program; None: it has one."""
        if self.bundle.compiled(self.engine, self.program.name) is not None:
            return None
        refusals = {refusal.program: refusal.reason for refusal in self.bundle.target(self.engine).refusals}
        return refusals.get(self.program.name, "it has none of this program")

    @property
    def exceeds_budget(self) -> bool:
        """Whether a memory budget asks for values that backward recomputes."""
        return self.request.memory_budget < 1 and self.program.grad

    @property
    def is_left_to_figures(self) -> bool:
        """Whether recorded figures decide: the target is `auto`, and no native code serves."""
        return self.request.target == "auto" and not self.exceeds_budget and not any(map(is_native, self.serving))

    @cached_property
    def forward(self) -> Graph:
        """The forward graph."""
        return self.bundle.graph(self.program.name, self.program.forward.file)

    @cached_property
    def functional(self) -> Graph:
        """The functional graph."""
        assert self.program.functional is not None
        return self.bundle.graph(self.program.name, self.program.functional.file)

    @property
    def functional_count(self) -> int:
        """How many operators the functional graph has."""
        return len(self.functional.nodes)

    @property
    def counts(self) -> str:
        """The operators of both graphs, in words."""
        return f"its {len(self.forward.nodes)} operators apart, into {len(self.functional.nodes)}"

    @cached_property
    def matmul(self) -> Matmul | None:
        """The largest matmul of the functional graph; None: it has none."""
        return figures.largest_matmul(self.functional)

    @property
    def matmul_in_words(self) -> str:
        """The sizes of the largest matmul."""
        assert self.matmul is not None
        rows, depth, columns = figures.sizes_of(self.matmul)
        return f"{rows}x{depth} by {depth}x{columns}"

    @cached_property
    def onednn_is_faster(self) -> bool:
        """Whether this machine measures oneDNN as faster for the largest matmul."""
        return self.matmul is not None and self.prefers_onednn is not None and self.prefers_onednn(self.matmul)

    @property
    def libraries_lose(self) -> bool:
        """Whether recorded figures speak against compiled libraries."""
        if self.request.target != "auto" or self.is_measured or not self.program.forward.differentiable:
            return False
        return not (figures.libraries_win(self.forward, self.functional) or self.onednn_is_faster)


def is_native(target: str) -> bool:
    """Return whether a target is native code, which not every machine runs."""
    return target == CUDA or target.partition("-")[0] == "cpu"


def is_of(engine: str, target: str) -> bool:
    """Return whether `target` of `load` names an engine: `cpu` names every compiled target."""
    return engine == target or (target == "cpu" and engine.startswith("cpu-"))
