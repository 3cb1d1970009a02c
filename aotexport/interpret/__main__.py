"""`TRITON_INTERPRET=1 python -m aotexport.interpret BUNDLE CANDIDATE`: print results and launches as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys

import numpy as np

from aotexport.capture.patches import replaced
from aotexport_runtime.bundle import open_bundle
from aotexport_runtime.engines.cuda import engine as cuda
from aotexport_runtime.self_test import read_vector, run_vector


def main() -> None:
    """Run the recorded calls of the programs that have kernels."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads TRITON_INTERPRET when it is imported"
    from aotexport.interpret.engine import InterpreterEngine

    path, candidate = sys.argv[1], int(sys.argv[2])
    bundle, engine = open_bundle(path), InterpreterEngine(candidate)
    namespaces = bundle.manifest.requirements.operator_namespaces
    for module in bundle.manifest.requirements.operator_modules:
        importlib.import_module(module)
    results = []
    # Masked lanes compute on whatever is there.
    with replaced(cuda, "CudaEngine", lambda _: engine), np.errstate(all="ignore"):
        for entry in bundle.manifest.testvectors:
            if bundle.has_target(cuda.TARGET, entry.program):
                vector, stored = read_vector(bundle, entry)
                results.append(
                    run_vector(path, entry.name, vector, stored, "cpu", cuda.TARGET, namespaces, trust="native")
                )
    found = [{**dataclasses.asdict(result), "agrees": result.agrees} for result in results]
    sys.stdout.write(json.dumps({"results": found, "launches": dict(engine.launches)}) + "\n")


if __name__ == "__main__":
    main()
