"""Metrics for Prometheus, of all workers together."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import contextlib
import os
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
QUEUE = Histogram("aotexport_queue_seconds", "How long a request waited for its batch", ["model"], buckets=_SECONDS)
COMPUTE = Histogram("aotexport_compute_seconds", "How long the batch of a request ran", ["model"], buckets=_SECONDS)
BATCH = Histogram(
    "aotexport_batch_size", "Size of the batch of a request", ["model"], buckets=[2**i for i in range(11)]
)
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


def write_metrics(accept: str | None) -> tuple[bytes, str]:
    """Return the metrics of every worker, and their content type."""
    written: list[str] = []
    for path in Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).glob("*.db"):
        with contextlib.suppress(FileNotFoundError):  # Its worker was forgotten.
            # A file is empty until its worker has sized it, and stays so if the worker is killed before.
            if path.stat().st_size:
                written.append(str(path))
    registry: Any = SimpleNamespace(collect=lambda: MultiProcessCollector.merge(written))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


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
