"""Metrics for Prometheus, of all workers together."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

REQUESTS = Counter(
    "aotexport_requests", "Requests by outcome: ok, or why not", ["model", "version", "protocol", "outcome"]
)
SECONDS = Histogram(
    "aotexport_request_seconds", "From the request to its answer", ["model", "version"], buckets=_SECONDS
)
QUEUE = Histogram(
    "aotexport_queue_seconds", "How long a request waited for its batch", ["model", "version"], buckets=_SECONDS
)
COMPUTE = Histogram(
    "aotexport_compute_seconds", "How long the batch of a request ran", ["model", "version"], buckets=_SECONDS
)
BATCH = Histogram("aotexport_batch_size", "Rows of a batch", ["model", "version"], buckets=[2**i for i in range(11)])
TOKENS = Counter("aotexport_generated_tokens", "Tokens that models have generated", ["model"])
FIRST = Histogram("aotexport_first_token_seconds", "From the request to its first token", ["model"], buckets=_SECONDS)
WAITING = Gauge("aotexport_waiting_requests", "Requests that wait", ["model"], multiprocess_mode="livesum")
VERSION = Gauge(
    "aotexport_model_workers", "Workers that serve a version", ["model", "version"], multiprocess_mode="livesum"
)
EVENTS = Counter("aotexport_model_events", "Versions loaded, failed and unloaded", ["model", "version", "event"])
EMPTY = Gauge("aotexport_repository_empty", "1: no bundle is in the repository", multiprocess_mode="livemax")
MEMORY = Gauge("aotexport_worker_memory_bytes", "Resident memory, by process", multiprocess_mode="liveall")
WORKERS = Counter("aotexport_workers_ended", "Workers that were replaced, by why", ["reason"])

_TOOK = {"success": "request", "queue": "queue", "compute_infer": "compute"}
"""Our names of the times that Triton's clients know."""


def write_metrics(accept: str | None) -> tuple[bytes, str]:
    """Return the metrics of every worker, and their content type."""
    registry: Any = SimpleNamespace(collect=_collected)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def statistics(models: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return what all workers have counted of models and their versions, as Triton's clients read it; rows count."""
    totals: collections.Counter[tuple[str, ...]] = collections.Counter()
    for family in _collected():
        for name, labels, value, *_ in family.samples:
            kind = "fail" if labels.get("outcome", "ok") != "ok" else name.removeprefix("aotexport_")
            totals[labels.get("model", ""), labels.get("version", ""), kind] += value

    def took(model: str, version: str, name: str) -> dict[str, int]:
        count, total_s = (totals[model, version, f"{name}_seconds_{kind}"] for kind in ("count", "sum"))
        return {"count": int(count), "ns": int(total_s * 1e9)}

    return [
        {
            "name": model,
            "version": version,
            "inference_count": int(totals[model, version, "batch_size_sum"]),
            "execution_count": int(totals[model, version, "batch_size_count"]),
            "inference_stats": {
                "fail": {"count": int(totals[model, version, "fail"]), "ns": 0},
                **{to: took(model, version, of) for to, of in _TOOK.items()},
            },
        }
        for model, version in models
    ]


def _collected() -> Iterator[Any]:
    """Return the metrics of every worker, by name."""
    written: list[str] = []
    for path in Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).glob("*.db"):
        with contextlib.suppress(FileNotFoundError):  # Its worker was forgotten.
            # A file is empty until its worker has sized it, and stays so if the worker is killed before.
            if path.stat().st_size:
                written.append(str(path))
    return MultiProcessCollector.merge(written)


@functools.lru_cache(1024)
def of_answers(model: str, version: str) -> list[Any]:
    """Return the histograms of a version's answers: of the whole, queue, engine and batch; looked up once."""
    return [each.labels(model, version) for each in (SECONDS, QUEUE, COMPUTE, BATCH)]


def count_event(model: str, version: str, event: str) -> None:
    """Count what happened to a model; see `Repository`."""
    EVENTS.labels(model, version, event).inc()
    if event != "failed":
        VERSION.labels(model, version).set(1 if event == "loaded" else 0)


def note_memory() -> None:
    """Note the resident memory of this process."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        MEMORY.set(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def forget_worker(pid: int, reason: str) -> None:
    """Count a worker that has ended, and forget what it measured of itself."""
    mark_process_dead(pid)
    WORKERS.labels(reason).inc()
