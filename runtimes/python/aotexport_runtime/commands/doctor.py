"""What this machine has for bundles, and what of it one bundle needs and uses."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import AotExportError
from aotexport_runtime.execution.user_cache import cache_folder
from aotexport_runtime.module.describe import trust_needed

_OPTIONAL = re.compile(r"""([\w.-]+).*extra == ['"](\w+)['"]""")


def machine() -> Iterator[str]:
    """Yield lines about this machine: its system, packages, devices, and what was measured on it."""
    yield f"system: {platform.platform()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    yield from (f"aotexport: {exporter.version}" for exporter in metadata.distributions(name="aotexport"))
    package = next(iter(metadata.distributions(name="aotexport-runtime")), None)
    yield f"aotexport-runtime: {package.version if package else 'not installed; its sources are on a path'}"
    for requirement in (package.requires if package else None) or ():
        named = _OPTIONAL.match(requirement)
        name = re.split(r"[^\w.-]", requirement)[0]
        missing = f"not installed; pip install 'aotexport-runtime[{named[2]}]'" if named else "not installed"
        yield f"{name}: {next((each.version for each in metadata.distributions(name=name)), missing)}"
    if importlib.util.find_spec("torch") is not None:
        yield from _devices()
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AOTEXPORT_", "OMP_", "MKL_"))}
    yield from (f"environment: {name}={value}" for name, value in sorted(variables.items()))
    for kind in ("matmul", "engines"):
        folder = cache_folder(kind)
        files = [] if folder is None else [*folder.glob("*.json")]
        yield f"measured ({kind}): {len(files)} files in {folder}"


def _devices() -> Iterator[str]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    yield f"cpu: {capability}, {torch.get_num_threads()} threads, oneDNN: {torch.backends.mkldnn.is_available()}"
    if not torch.cuda.is_available():
        built = (
            f"built for CUDA {torch.version.cuda}, and finds no device" if torch.version.cuda else "built without it"
        )
        yield f"cuda: none; torch is {built}"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {found.name}, sm_{found.major}{found.minor}, {found.total_memory >> 20} MiB"


def of_bundle(path: Path) -> tuple[list[str], bool]:
    """Return what a bundle needs and which engines run its programs here, and whether it can be loaded.

    Raises:
        BundleInvalid: it is malformed.
        NotSupported: it is of a later format, or beyond the limits.
    """
    bundle = open_bundle(path)
    manifest = bundle.manifest
    lines = [f"bundle: {manifest.name}, format {manifest.format}, trust needed: {trust_needed(bundle)}"]
    if importlib.util.find_spec("torch") is None:
        models = ", ".join(model.program for model in manifest.onnx)
        has_models = f"ONNX models of {models} run without it" if models else "it has no ONNX model"
        return [*lines, f"torch is not installed; {has_models}"], bool(models)
    from aotexport_runtime.module.loading import load

    try:
        return [*lines, str(load(bundle).explain())], True
    except AotExportError as error:
        return [*lines, f"it cannot be loaded here: {error}"], False
