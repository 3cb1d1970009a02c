"""One fresh process per measurement: how long to the first result, or how much memory loading takes.

    python -m benchmarks.fresh '{"what": "start" | "memory", "spawned_s": ..., ...}'

Prints one line of JSON. Imports nothing before it is asked to: what a system imports is part of the figure.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.meters import cpu_s, private_nbytes, wall_s


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spec = json.loads(sys.argv[1])
    answer = {"start": _start, "memory": _memory}[spec["what"]](spec)
    print(json.dumps(answer), file=answers, flush=True)


def _start(spec: dict[str, Any]) -> dict[str, Any]:
    """Return seconds since the process was asked for, per stage; with action None it only imports torch."""
    marks = [("interpreter", spec["spawned_s"], wall_s())]

    def mark(stage: str) -> None:
        marks.append((stage, marks[-1][2], wall_s()))

    import torch

    torch.set_num_threads(spec["threads"])
    mark("import torch")
    if spec["action"] is not None:
        job = _job(spec)
        action = _loaded(job, spec["action"])
        mark("import and load")
        action()
        mark(f"first {spec['action']}")
    stages = {stage: end - start for stage, start, end in marks}
    return {"wall_s": marks[-1][2] - spec["spawned_s"], "cpu_s": cpu_s(), "stages": stages}


def _memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Return growth of private bytes by loading, and by loading and one inference; and the bytes of the weights.

    Everything is imported and run once on the small model `mlp` first: a process pays for that once, not per bundle.
    """
    import torch

    from benchmarks.models import call

    torch.set_num_threads(spec["threads"])
    _loaded(_job({**spec, "model": "mlp", "directory": spec["small"]}), "inference")()
    before = private_nbytes()
    job = _job(spec)
    module, inputs = job.load("infer"), job.model.inputs()
    loaded = private_nbytes()
    with torch.no_grad():
        call(module, inputs)
    used = private_nbytes()
    weights = sum(tensor.nbytes for tensor in job.model.module().state_dict().values())
    growth = {
        f"{kind}, {when}": reading[kind] - before[kind]
        for when, reading in (("loaded", loaded), ("after one inference", used))
        for kind in ("private", "anonymous")
    }
    return {"nbytes": growth, "weights_nbytes": weights}


def _job(spec: dict[str, Any]) -> Any:
    from benchmarks.job import Job
    from benchmarks.models import MODELS
    from benchmarks.systems import SYSTEMS

    return Job(SYSTEMS[spec["system"]], MODELS[spec["model"]], Path(spec["directory"]), spec["variant"])


def _loaded(job: Any, action: str) -> Any:
    from benchmarks.actions import ACTIONS

    return ACTIONS[action](job)


if __name__ == "__main__":
    main()
