"""`TRITON_INTERPRET=1 python -m aotexport.verify.interpret BUNDLE CANDIDATE`: print results and launches as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys

import numpy as np

from aotexport.process.patches import Patch, patched
from aotexport_runtime.__main__ import class_named
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.commands.self_test import run_vector, without_target
from aotexport_runtime.engines.cuda import engine as cuda
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.rewrite.names import random_nodes


def main() -> None:
    """Run the recorded calls of the programs that have kernels and draw no random numbers."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads TRITON_INTERPRET when it is imported"
    from aotexport.verify.interpret.engine import InterpreterEngine

    path, candidate = sys.argv[1], int(sys.argv[2])
    bundle, engine = open_bundle(path), InterpreterEngine(candidate)
    namespaces = bundle.manifest.requirements.operator_namespaces
    types = {name: class_named(name) for name in bundle.manifest.requirements.tensor_types}
    for module in bundle.manifest.requirements.operator_modules:
        importlib.import_module(module)
    having = [name for name in bundle.program_names if bundle.has_target(cuda.TARGET, name)]
    drawing = [name for name in having if _draws(bundle, name)]
    options = LoadOptions(
        target=cuda.TARGET, device="cpu", trust="native", operator_namespaces=namespaces, tensor_types=types
    )
    results = []
    # Masked lanes compute on arbitrary values.
    with (
        patched(Patch(cuda, "CudaEngine", lambda _: engine, "Run kernels in an interpreter")),
        np.errstate(all="ignore"),
    ):
        for entry in bundle.manifest.testvectors:
            if entry.program in having and entry.program not in drawing:
                vector, stored = read_vector(bundle, entry)
                results.append(run_vector(path, entry.name, vector, stored, options))
    results = [without_target(result, results) for result in results]
    found = [{**dataclasses.asdict(result), "agrees": result.agrees} for result in results]
    sys.stdout.write(json.dumps({"results": found, "drawing": drawing, "launches": dict(engine.launches)}) + "\n")


def _draws(bundle: Bundle, name: str) -> bool:
    functional = bundle.program(name).functional
    return functional is not None and bool(random_nodes(bundle.graph(name, functional.file)))


if __name__ == "__main__":
    main()
