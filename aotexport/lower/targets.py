"""The forms that a bundle can ship."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from aotexport.errors import ModelFileInvalid
from aotexport.lower.cpu.levels import LEVELS, Level, own_level

TARGETS = {
    "portable": "operator calls of torch on any device; always included",
    "cpu": "shared libraries for the processor of this machine; `cpu:v3,v4` names levels of x86-64",
    "cuda": "kernels for NVIDIA GPUs, built without one; `cuda:sm_80,sm_90` names the architectures",
}
"""Targets by name, with descriptions."""

CUDA_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""All known architectures, and those that kernels are compiled for by default."""


@dataclass(frozen=True)
class Targets:
    """Targets beside the portable form: architectures of `cuda`, levels of `cpu` with the lowest first."""

    cuda: tuple[str, ...] = ()
    cpu: tuple[Level, ...] = ()


def check_targets(targets: Iterable[str]) -> Targets:
    """Return the requested targets.

    Raises:
        ModelFileInvalid: names an unknown target or architecture with the known ones, or a missing package.
    """
    cuda: set[str] = set()
    cpu: set[str] = set()
    for target in targets:
        name, _, options = target.partition(":")
        if name not in TARGETS or (options and name not in ("cpu", "cuda")):
            hint = ". ONNX models are an option of their own: --onnx (onnx=True)" if name == "onnx" else ""
            raise ModelFileInvalid(f"no target `{target}`; there are {', '.join(TARGETS)}{hint}")
        if name == "cpu":
            cpu.update(options.split(",") if options else [_own_level()])
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


def _own_level() -> str:
    own = own_level()
    if own is None:
        raise ModelFileInvalid("this machine has no level of target `cpu`; name some, as in `cpu:v3,v4`")
    return next(name for name, level in LEVELS.items() if level == own)
