"""Options of `python -m aotexport_runtime serve`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.schema.limits import Limits

SERVED = Limits(calls=10_000_000)
"""What bundles may ask for, unless `--limits` says otherwise: calls of a server end."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server serves, and how; the fields are the options of the command line."""

    repository: Path
    name: str | None = None
    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    workers: int = 1
    threads: int | None = None
    engine: str | None = None
    device: str = "cpu"
    max_batch_size: int = 32
    max_latency_ms: float = 0.0
    max_waiting: int = 1024
    max_request_bytes: int = 64 << 20
    request_timeout_s: float = 30.0
    memory_limit: int | None = None
    poll_s: float = 1.0
    drain_s: float = 30.0
    trust: Literal["data", "native"] = "data"
    mapped: bool = False
    access_log: bool = True
    ui: bool = True
    limits: Limits = SERVED
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def threads_per_worker(self) -> int:
        """Threads of an operator in each worker."""
        return self.threads or max(1, usable_cores() // self.workers)


def own_cores() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many processors this process may keep busy: those it may run on, at most what its container has whole.

    Args:
        quota: the file in which Linux names the processor time that a container has of each period.
    """
    cores = own_cores()
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cores, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file; or `max`: no quota
        return cores


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the command."""
    parser.add_argument("repository", type=Path, help="a bundle, or a directory of them: MODEL/VERSION/ or MODEL/")
    add = parser.add_argument
    add("--name", help="serve one model by this name: the bundle, or the directory of its versions")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: every one (default: %(default)s)")
    add("--http-port", type=int, default=8080, help="0: any that is free (default: %(default)s)")
    add("--grpc-port", type=int, default=8081, help="0: any that is free (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes, which share the weights (default: %(default)s)")
    add(
        "--threads",
        type=int,
        help="threads of an operator in each worker (default: the container's cores / workers)",
    )
    add("--engine", help="target of `load` (default: auto)")
    add("--device", default="cpu", help="where models run (default: %(default)s)")
    add(
        "--max-batch-size", type=int, default=32, help="greatest joined batch; 1: none is joined (default: %(default)s)"
    )
    add("--max-latency-ms", type=float, default=0.0, help="how long a request waits for others (default: 0)")
    add("--max-waiting", type=int, default=1024, help="most requests that wait for a model (default: %(default)s)")
    add("--max-request-bytes", type=int, default=64 << 20, help="greatest request (default: %(default)s)")
    add("--request-timeout-s", type=float, default=30.0, help="longest time of a request (default: %(default)s)")
    add("--memory-limit", type=int, metavar="BYTES", help="most bytes of loaded bundles (default: any number)")
    add("--poll-s", type=float, default=1.0, help="time between looks at the repository (default: %(default)s)")
    add(
        "--drain-s",
        type=float,
        default=30.0,
        help="longest time for the last requests at the end (default: %(default)s)",
    )
    add("--trust", choices=("data", "native"), default="data", help="native: run native files as well")
    add(
        "--mapped",
        action="store_true",
        help="map weights, so that workers share them; nobody may write into files that are served",
    )
    add(
        "--limits",
        default="",
        metavar="NAME=NUMBER,...",
        help="the most that a bundle may ask for, by the names of `Limits`: nodes=20000,bundle_nbytes=2000000000",
    )
    add("--access-log", choices=("on", "off"), default="on", help="one line per request (default: %(default)s)")
    add("--no-ui", dest="ui", action="store_false", help="serve no page at /ui to try models in a browser")
    add("--tls-cert", type=Path, help="certificate, for HTTPS and gRPC with TLS")
    add("--tls-key", type=Path, help="its key")


_LEAST = {
    "http_port": 0,
    "grpc_port": 0,
    "workers": 1,
    "threads": 1,
    "max_batch_size": 1,
    "max_latency_ms": 0,
    "max_waiting": 1,
    "max_request_bytes": 1,
    "request_timeout_s": 0.001,
    "memory_limit": 1,
    "poll_s": 0.01,
    "drain_s": 0,
}


def options_of(parsed: Any) -> ServeOptions:
    """Return the options of a command line.

    Raises:
        ArgumentInvalid: a value is out of range, or the repository is no directory.
    """
    values = {name: getattr(parsed, name) for name in ServeOptions.__dataclass_fields__}
    for name, least in _LEAST.items():
        if values[name] is not None and values[name] < least:
            raise ArgumentInvalid(f"`--{name.replace('_', '-')}`: expected at least {least}, got {values[name]}")
    if not parsed.repository.is_dir():
        raise ArgumentInvalid(f"`{parsed.repository}` is no directory; name a bundle, or a directory of bundles")
    if (parsed.tls_cert is None) != (parsed.tls_key is None):
        raise ArgumentInvalid("`--tls-cert` and `--tls-key` belong together")
    values["access_log"], values["limits"] = parsed.access_log == "on", limits_of(parsed.limits)
    return ServeOptions(**values)


def limits_of(text: str) -> Limits:
    """Return the limits in a text such as `nodes=20000,json_depth=32`; others are those of `SERVED`.

    Raises:
        ArgumentInvalid: a name is none of `Limits`, or a number none above 0.
    """
    known = [field.name for field in dataclasses.fields(Limits)]
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in known:
            raise ArgumentInvalid(f"`--limits`: no limit `{name}`; there are {', '.join(known)}")
        if not (number.isascii() and number.isdecimal() and int(number) > 0):
            raise ArgumentInvalid(f"`--limits`: `{name}` is a number above 0, got `{number}`")
        found[name] = int(number)
    return dataclasses.replace(SERVED, **found)
