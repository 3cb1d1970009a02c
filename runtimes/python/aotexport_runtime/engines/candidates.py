"""The names of engines, and the arguments of `load` that choose one. No torch."""

from __future__ import annotations

from dataclasses import dataclass

CUDA, PORTABLE, AUTOGRAD, ONNX, OPENVINO = "cuda", "portable", "autograd", "onnx", "openvino"
"""Names of the engines that run kernels, functional graphs, forward graphs, and ONNX models by ONNX Runtime and by
OpenVINO; compiled targets are `cpu-LEVEL`."""

PACKED = "packed"
"""Name of the engine that runs inference graphs by layers of oneDNN, where weights stay."""

MODEL_ENGINES = (ONNX, OPENVINO)
"""Those that run ONNX models."""

FROZEN_ENGINES = (PACKED, *MODEL_ENGINES)
"""Those that hold copies of the weights."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `load` that choose an engine; see there."""

    target: str = "auto"
    trust: str = "data"
    memory_budget: float = 1
    frozen: bool | str = False

    @property
    def precision(self) -> str:
        """In which precision layers of frozen weights compute; empty: in that of the graph."""
        return self.frozen if isinstance(self.frozen, str) else ""


def is_native(target: str) -> bool:
    """Return whether a target is native code, which not every machine runs."""
    return target == CUDA or target.partition("-")[0] == "cpu"


def is_of(engine: str, target: str) -> bool:
    """Return whether `target` of `load` names an engine: `cpu` names every compiled target."""
    return engine == target or (target == "cpu" and engine.startswith("cpu-"))
