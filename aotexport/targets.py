"""The forms that a bundle can ship."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from aotexport.errors import ModelFileInvalid

TARGETS = {
    "portable": "operator calls of torch on any device; always included",
    "cuda": "kernels for NVIDIA GPUs, built without one; `cuda:sm_80,sm_90` names the architectures",
}
"""Targets by name, with what they are."""

CUDA_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures that kernels are compiled for unless some are named, and the only ones that are known."""


@dataclass(frozen=True)
class Targets:
    """What an export ships beside the portable form.

    Attributes:
        cuda: architectures of the target `cuda`; empty: without it.
    """

    cuda: tuple[str, ...] = ()


def check_targets(targets: Iterable[str]) -> Targets:
    """Return what was asked for.

    Raises:
        ModelFileInvalid: names an unknown target or architecture with the known ones, or what must be installed.
    """
    cuda: list[str] = []
    for target in targets:
        name, _, options = target.partition(":")
        if name not in TARGETS or (options and name != "cuda"):
            raise ModelFileInvalid(f"no target `{target}`; there are {', '.join(TARGETS)}")
        if name == "cuda":
            cuda += _architectures(options) if options else CUDA_ARCHITECTURES
    if cuda and importlib.util.find_spec("triton") is None:
        raise ModelFileInvalid("the target `cuda` needs Triton: pip install 'aotexport[cuda]'")
    return Targets(cuda=tuple(name for name in CUDA_ARCHITECTURES if name in cuda))


def _architectures(options: str) -> list[str]:
    names = options.split(",")
    for name in names:
        if name not in CUDA_ARCHITECTURES:
            raise ModelFileInvalid(f"no architecture `{name}`; there are {', '.join(CUDA_ARCHITECTURES)}")
    return names
