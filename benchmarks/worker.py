"""One process per system, model and action: does it once, then answers every line of standard input with a round.

    python -m benchmarks.worker '{"system": ..., "model": ..., "action": ..., "directory": ..., ...}'

With "round_s": 0 a round is one execution, and nothing is run to warm up. With "ranks" it is one of a group, whose
processes are asked together. Answers are lines of JSON on the
standard output that the process was started with; whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.actions import ACTIONS, Action
from benchmarks.job import Job
from benchmarks.meters import allocated_nbytes, cpu_s, peak_nbytes, wall_s
from benchmarks.models import MODELS
from benchmarks.sharing import SharedStep, join
from benchmarks.systems import SYSTEMS, Prepared

_WARM_UP_S = 0.5
_CHUNK_S = 1e-3
"""Shortest stretch that is timed as one, so that reading the clocks costs nothing."""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spec = json.loads(sys.argv[1])
    model = MODELS[spec["model"]]
    if not spec.get("dynamic"):
        model = replace(model, sizes=None)
    job = Job(SYSTEMS[spec["system"]], model, Path(spec["directory"]), spec["variant"])
    for answer in _answers(job, spec):
        print(json.dumps(answer), file=answers, flush=True)


def _answers(job: Job, spec: dict[str, Any]) -> Any:
    import torch

    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    if "ranks" in spec:
        join(spec["store"], spec["rank"], spec["ranks"])
    action = ACTIONS[spec["action"]](job)
    first = _first(action, job)
    if isinstance(action, SharedStep):
        first["held_nbytes"] = action.held_nbytes()
    if spec.get("allocations"):
        action()  # The optimizer has its state then.
        first["allocated_nbytes"] = allocated_nbytes(action)
    yield first
    rounds = None if spec["round_s"] else (1, 1)
    for _ in sys.stdin:
        if rounds is None:
            rounds = _calibrate(action, spec["round_s"])
        if spec["round_s"]:
            action()  # refills the caches that the other processes have used in between
        yield _round(action, *rounds)


def _first(action: Action, job: Job) -> dict[str, Any]:
    """Return the first execution's times, what preparing told, and the loss to compare between systems."""
    wall, cpu = wall_s(), cpu_s()
    result = action()
    answer: dict[str, Any] = {"wall_s": wall_s() - wall, "cpu_s": cpu_s() - cpu, "peak_nbytes": peak_nbytes()}
    if isinstance(result, Prepared):
        return {**answer, **_told(result), "notes": result.notes}
    if result is None:
        return answer
    is_loss = getattr(result, "ndim", None) == 0
    return {**answer, "loss": (result if is_loss else job.model.loss(result)).item()}


def _calibrate(action: Action, round_s: float) -> tuple[int, int]:
    """Return how many chunks of how many executions fill a round; warms up on the way."""
    start, count = wall_s(), 0
    while wall_s() - start < max(round_s, _WARM_UP_S):
        action()
        count += 1
    each = (wall_s() - start) / count
    per_chunk = max(1, math.ceil(_CHUNK_S / each))
    return max(1, round(round_s / (per_chunk * each))), per_chunk


def _round(action: Action, chunks: int, per_chunk: int) -> dict[str, Any]:
    """Return wall and processor time of one execution: medians over the chunks, and the least of the wall times."""
    gc.collect()
    walls: list[float] = []
    cpus: list[float] = []
    result: Any = None
    for _ in range(chunks):
        cpu, wall = cpu_s(), wall_s()
        for _ in range(per_chunk):
            result = action()
        walls.append((wall_s() - wall) / per_chunk)
        cpus.append((cpu_s() - cpu) / per_chunk)
    answer = {"wall_s": statistics.median(walls), "cpu_s": statistics.median(cpus), "best_s": min(walls)}
    return {**answer, **_told(result)} if isinstance(result, Prepared) else answer


def _told(result: Prepared) -> dict[str, Any]:
    return {"stages": result.stages, "stages_cpu": result.stages_cpu, "stages_peak": result.stages_peak}


if __name__ == "__main__":
    main()
