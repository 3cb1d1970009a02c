"""What the figures depend on beside the code: machine, versions, threads. No date: same machine, same text."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    *("torch", "transformers", "numpy", "safetensors", "onnx", "onnxscript", "onnxruntime", "aotexport"),
    "aotexport-runtime",
)
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def describe(threads: int) -> dict[str, str]:
    """Return what a reader needs to know, by name."""
    cpu = _cpu()
    flags = cpu.get("flags", "").split()
    return {
        "processor": cpu.get("model name", platform.processor() or platform.machine()),
        "instructions": ", ".join(name for name in _INSTRUCTIONS if name in flags) or "unknown",
        "cores": str(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else str(os.cpu_count()),
        "threads of torch": str(threads),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.system(),
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _cpu() -> dict[str, str]:
    """Return the fields of the first processor."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
