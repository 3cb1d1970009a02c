"""The forms that a bundle can ship: levels of x86-64 of libraries, architectures of kernels, ONNX models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from aotexport.errors import ModelFileInvalid
from aotexport_runtime.values.arguments import check_type

TARGETS = ("portable", "cpu", "cuda")

CUDA_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""All known architectures, and those that kernels are compiled for by default."""

OPSETS = range(18, 24)
"""Operator sets of ONNX that torch's exporter can translate to."""


@dataclass(frozen=True)
class Level:
    """A level: its name in the bundle and for the C++ compiler (`march`), and the width of its vector registers."""

    name: Literal["x86_64-v3", "x86_64-v4"]
    march: str
    vector_nbits: int

    @property
    def target(self) -> str:
        """Name of the target of this level."""
        return f"cpu-{self.name}"


LEVELS = {
    "v3": Level(name="x86_64-v3", march="x86-64-v3", vector_nbits=256),
    "v4": Level(name="x86_64-v4", march="x86-64-v4", vector_nbits=512),
}
"""Levels by short name, lowest first."""


def own_level() -> Level | None:
    """Return the highest level that this machine has; None: none of them."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return LEVELS["v4"]
    return LEVELS["v3"] if capability.startswith("AVX2") else None


@dataclass(frozen=True)
class Targets:
    """Targets beside the portable form: architectures of `cuda`, levels of `cpu` with the lowest first."""

    cuda: tuple[str, ...] = ()
    cpu: tuple[Level, ...] = ()


def check_targets(targets: Iterable[str]) -> Targets:
    """Return the requested targets; refuse what is unknown, with what is known, and a missing package."""
    cuda: set[str] = set()
    cpu: set[str] = set()
    for target in targets:
        name, _, options = target.partition(":")
        if name not in TARGETS or (options and name not in ("cpu", "cuda")):
            hint = ". ONNX models are an option of their own: --onnx (onnx=True)" if name == "onnx" else ""
            raise ModelFileInvalid(f"no target `{target}`; there are {', '.join(TARGETS)}{hint}")
        if name == "cpu":
            own = [short for short, level in LEVELS.items() if level == own_level()]
            if not options and not own:
                raise ModelFileInvalid("this machine has no level of target `cpu`; name some, as in `cpu:v3,v4`")
            cpu.update(options.split(",") if options else own)
        if name == "cuda":
            cuda.update(options.split(",") if options else CUDA_ARCHITECTURES)
    for name in sorted(cuda - {*CUDA_ARCHITECTURES}):
        raise ModelFileInvalid(f"no architecture `{name}`; there are {', '.join(CUDA_ARCHITECTURES)}")
    if cuda and importlib.util.find_spec("triton") is None:
        raise ModelFileInvalid("the target `cuda` needs Triton: pip install 'aotexport[cuda]'")
    for name in sorted(cpu - {*LEVELS}):
        raise ModelFileInvalid(f"no level `{name}` of target `cpu`; there are {', '.join(LEVELS)}")
    return Targets(
        cuda=tuple(name for name in CUDA_ARCHITECTURES if name in cuda),
        cpu=tuple(level for name, level in LEVELS.items() if name in cpu),
    )


@dataclass(frozen=True)
class OnnxOptions:
    """How a bundle's programs become ONNX models.

    Attributes:
        opset: operator set.
        state: `refuse`: programs that change state or inputs, or return views of them, are refused. `outputs`: changed
            tensors are returned after their outputs, and views are returned as copies.
        programs: which programs; empty: all that record no gradients.
        translations: ONNX Script functions by the operator of torch that they translate, beside torch's own.
    """

    opset: int = 20
    state: Literal["refuse", "outputs"] = "refuse"
    programs: tuple[str, ...] = ()
    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)


def check_options(options: OnnxOptions) -> None:
    """Refuse wrong options before anything is done; `ModelFileInvalid`: names the option or the missing package."""
    check_type("options", options, OnnxOptions, "`OnnxOptions`")
    missing = [name for name in ("onnx", "onnxscript", "onnx_ir", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelFileInvalid(f"ONNX needs {', '.join(missing)}: `pip install 'aotexport[onnx]'`")
    if options.opset not in OPSETS:
        raise ModelFileInvalid(f"no operator set {options.opset}; there are {OPSETS[0]} to {OPSETS[-1]}")
    if options.state not in ("refuse", "outputs"):
        raise ModelFileInvalid(f"no way {options.state!r} for state in ONNX; there are refuse, outputs")
