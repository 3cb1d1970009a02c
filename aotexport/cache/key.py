"""The key of an export: a digest of all that it reads besides files, whose states are in the entry itself."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aotexport.cache.digests import digest_of
from aotexport.cache.files import compilers, installed_packages, libraries_of_torch, own_sources

_OF_SHELLS = frozenset(
    (
        "_",
        "SHLVL",
        "PWD",
        "OLDPWD",
        "COLUMNS",
        "LINES",
        "TERM",
        "COLORTERM",
        "WINDOWID",
        "XDG_SESSION_ID",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SSH_TTY",
    )
)
"""Variables that tell one terminal from another; all others are part of the key."""
_OF_THE_CACHE = frozenset(("AOTEXPORT_CACHE", "AOTEXPORT_CACHE_SIZE"))
_OF_PROCESSORS = frozenset(("model name", "flags", "Features", "CPU part"))


def key_of(objects: Mapping[str, Any], root: Path) -> str:
    """Return the key of an export.

    Args:
        objects: the model, its example calls and the options, by name.
        root: directory of the model file: code below it is named by its place in it.

    Raises:
        NotDigestible: an object has content that cannot be read.
    """
    known = [
        own_sources(),
        _machine(),
        _interpreter(root),
        libraries_of_torch(),
        installed_packages(),
        compilers(),
        {name: os.environ[name] for name in sorted({*os.environ} - _OF_SHELLS - _OF_THE_CACHE)},
        _settings(),
        digest_of(objects, root),
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _machine() -> list[str]:
    found = [sys.version, platform.platform(), torch.__version__, torch.__config__.show()]
    found += [torch.backends.cpu.get_cpu_capability(), str(torch.cuda.is_available())]
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        found += [line for line in lines if line.partition(":")[0].strip() in _OF_PROCESSORS]
    return found


def _interpreter(root: Path) -> list[str]:
    """Return the interpreter's options, and the directories that imports and names of files are relative to."""
    places = [os.getcwd(), *sys.path]
    found = [place.removeprefix(str(root)) if Path(place).is_relative_to(root) else place for place in places]
    return [str(sys.flags), str(sys.warnoptions), *found]


def _settings() -> list[str]:
    """Return the settings of torch that change what operators give, and the state of its generator."""
    found = [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,  # pyright: ignore[reportAttributeAccessIssue]
        sorted(torch.ops.loaded_libraries),
        hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    ]
    return [str(each) for each in found]
