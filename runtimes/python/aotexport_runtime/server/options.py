"""Options of `python -m aotexport_runtime serve`."""
# ruff: noqa: RUF009 (`_option` makes fields)

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.schema.limits import Limits

SERVED = Limits(calls=10_000_000)
"""What bundles may ask for, unless `--limits` says otherwise: calls of a server end."""


def _option(default: Any, text: str, kind: type = str, /, *, least: float | None = None, **how: Any) -> Any:
    """Return a field that is an option of the command line; `how` it is parsed, beside `kind` and `default`."""
    parsed = how if "action" in how else {"type": kind, "default": default, **how}
    return field(default=default, metadata={"least": least, "parsed": {"help": text, **parsed}})


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server serves, and how; the fields are the options of the command line."""

    repository: Path
    name: str | None = _option(None, "serve one model by this name: the bundle, or the directory of its versions")
    host: str = _option("127.0.0.1", "address to listen at; 0.0.0.0: every one (default: %(default)s)")
    http_port: int = _option(8080, "0: any that is free (default: %(default)s)", int, least=0)
    grpc_port: int = _option(8081, "0: any that is free (default: %(default)s)", int, least=0)
    workers: int = _option(1, "processes, which share the weights (default: %(default)s)", int, least=1)
    threads: int | None = _option(
        None, "threads of an operator in each worker (default: the container's cores / workers)", int, least=1
    )
    engine: str | None = _option(None, "target of `load` (default: auto)")
    device: str = _option("cpu", "where models run (default: %(default)s)")
    max_batch_size: int = _option(32, "greatest joined batch; 1: none is joined (default: %(default)s)", int, least=1)
    max_latency_ms: float = _option(0.0, "how long a request waits for others (default: 0)", float, least=0)
    max_waiting: int = _option(1024, "most requests that wait for a model (default: %(default)s)", int, least=1)
    max_request_bytes: int = _option(64 << 20, "greatest request (default: %(default)s)", int, least=1)
    request_timeout_s: float = _option(30.0, "longest time of a request (default: %(default)s)", float, least=0.001)
    memory_limit: int | None = _option(
        None, "most bytes of loaded bundles (default: any number)", int, least=1, metavar="BYTES"
    )
    poll_s: float = _option(1.0, "time between looks at the repository (default: %(default)s)", float, least=0.01)
    drain_s: float = _option(
        30.0, "longest time for the last requests at the end (default: %(default)s)", float, least=0
    )
    trust: Literal["data", "native"] = _option("data", "native: run native files as well", choices=("data", "native"))
    mapped: bool = _option(
        False,
        "map weights, so that workers share them; nobody may write into files that are served",
        action="store_true",
    )
    limits: Limits = _option(
        SERVED,
        "the most that a bundle may ask for, by the names of `Limits`: nodes=20000,bundle_nbytes=2000000000",
        default="",
        metavar="NAME=NUMBER,...",
    )
    access_log: bool = _option(True, "one line per request (default: %(default)s)", default="on", choices=("on", "off"))
    ui: bool = _option(True, "serve no page at /ui to try models in a browser", action="store_false")
    tls_cert: Path | None = _option(None, "certificate, for HTTPS and gRPC with TLS", Path)
    tls_key: Path | None = _option(None, "its key", Path)

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
    for each in dataclasses.fields(ServeOptions)[1:]:
        flag = "--no-ui" if each.name == "ui" else f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, dest=each.name, **each.metadata["parsed"])


def options_of(parsed: Any) -> ServeOptions:
    """Return the options of a command line.

    Raises:
        ArgumentInvalid: a value is out of range, or the repository is no directory.
    """
    values = {each.name: getattr(parsed, each.name) for each in dataclasses.fields(ServeOptions)}
    for each in dataclasses.fields(ServeOptions):
        least, value = each.metadata.get("least"), values[each.name]
        if least is not None and value is not None and value < least:
            raise ArgumentInvalid(f"`--{each.name.replace('_', '-')}`: expected at least {least}, got {value}")
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
