"""Run kernels of a bundle from their sources, by Triton's interpreter on the CPU, and compare with recorded calls."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

from aotexport.verify.fresh import printed
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.engines.cuda.choice import TARGET
from aotexport_runtime.errors import NotSupported


@dataclass(frozen=True)
class Interpreted:
    """The results of interpreting a bundle's kernels.

    `drawing` are programs that draw other random numbers than eager, and are not compared; `launches` is the number of
    launches of each kernel, by `name/candidate`.
    """

    results: list[VectorResult]
    drawing: list[str]
    launches: dict[str, int]


def interpret(bundle: Bundle, candidate: int = 0) -> Interpreted:
    """Run the recorded calls of a bundle with its kernels interpreted: slow, and without a GPU.

    This runs Python code of the bundle, the sources of its kernels. `candidate` is the configuration of each kernel to
    run; the last one, if a kernel has fewer. `NotSupported`: there are no kernels or sources, or Triton is missing.
    """
    if not any(bundle.has_target(TARGET, name) for name in bundle.program_names):
        raise NotSupported("the bundle has no kernels. Export it with `--target cuda`")
    if any(kernel.source is None for kernel in bundle.kernels(TARGET).kernels):
        raise NotSupported("the bundle has its kernels without their sources, which are what can be interpreted")
    if importlib.util.find_spec("triton") is None:
        raise NotSupported("kernels are interpreted by Triton: pip install 'aotexport[cuda]'")
    # Triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "aotexport.verify.interpret", str(bundle.root), str(candidate)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return printed(process, Interpreted, "process that interprets the kernels")
