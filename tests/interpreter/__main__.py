"""`TRITON_INTERPRET=1 python -m tests.interpreter BUNDLE [CANDIDATE]`: print results and launches as JSON."""

from __future__ import annotations

import json
import os
import sys
from unittest import mock

import numpy as np

from aotexport_runtime import loading
from aotexport_runtime.self_test import describe_failures, run_vectors


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads TRITON_INTERPRET when it is imported"
    from tests.interpreter.engine import InterpreterEngine

    path, candidate = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    engine = InterpreterEngine(candidate)
    # Masked lanes compute on whatever is there.
    with mock.patch.object(loading, "_lowering", return_value=engine), np.errstate(all="ignore"):
        results = run_vectors(path, device="cpu", target="cuda")
    failures = [line for result in results for line in describe_failures(result)]
    worst = max((d.error for result in results for d in result.differences), default=0.0)
    compared = [f"{result.program}/{result.vector}" for result in results]
    print(json.dumps({"failures": failures, "worst": worst, "compared": compared, "launches": dict(engine.launches)}))


if __name__ == "__main__":
    main()
