"""Options of `python -m aotexport_runtime serve`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Any, ClassVar, Literal

from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.schema.limits import Limits
from aotexport_runtime.serving.options import ServableOptions

SERVED = Limits(calls=10_000_000)
"""What bundles may ask for, unless `--limits` says otherwise: calls of a server end."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServableOptions):
    """What a server serves, and how; the fields are the options of the command line, which shows these sentences.

    Attributes:
        repository: a bundle, or a directory of them: MODEL/VERSION/ or MODEL/
        name: serve one model by this name: the bundle, or the directory of its versions
        serve_versions: those of each model: newest: the newest that passes; all; or numbers: 1,3
        require: model that has to be served before the server is ready (repeatable)
        readiness: strict: ready when every model that was there at first is served; serving: when any is
        host: address to listen at; 0.0.0.0: every one
        http_port: 0: any that is free
        grpc_port: 0: any that is free
        admin_port: port of their own for load and unload, by HTTP; beside it index, metrics and health (default: none)
        admin_token_file: file with the token that load and unload need: `Authorization: Bearer TOKEN`
        workers: processes, which share the weights
        threads: threads of an operator in each worker (default: the container's cores / workers)
        limits: the most that a bundle may ask for, by the names of `Limits`: nodes=20000,bundle_nbytes=2000000000
        allow_host: name by which browsers may reach the server, beside addresses and localhost (repeatable)
        max_request_bytes: greatest request
        max_held_bytes: most bytes of requests that a worker holds at once
        max_connections: most connections of a worker, by HTTP; most requests at once, by gRPC
        request_timeout_s: longest time of a request
        memory_limit: most bytes of loaded bundles (default: any number)
        poll_s: time between looks at the repository; SIGHUP: look now, and try again what has failed
        drain_s: after SIGTERM, longest time for requests that run; others are refused
        access_log: one line per request
        ui: serve no page at /ui to try models in a browser
        tls_cert: certificate, for HTTPS and gRPC with TLS
        tls_key: its key
    """

    repository: Path
    name: str | None = None
    serve_versions: str = "newest"
    require: tuple[str, ...] = ()
    readiness: Literal["strict", "serving"] = "strict"
    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    admin_port: int | None = None
    admin_token_file: Path | None = None
    workers: int = 1
    limits: Limits = SERVED
    allow_host: tuple[str, ...] = ()
    max_request_bytes: int = 64 << 20
    max_held_bytes: int = 512 << 20
    max_connections: int = 4096
    request_timeout_s: float = 30.0
    memory_limit: int | None = None
    poll_s: float = 1.0
    drain_s: float = 30.0
    access_log: Literal["on", "off"] = "on"
    ui: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None

    LEAST: ClassVar[dict[str, float]] = ServableOptions.LEAST | {
        "http_port": 0,
        "grpc_port": 0,
        "admin_port": 0,
        "workers": 1,
        "max_request_bytes": 1,
        "max_held_bytes": 1,
        "max_connections": 1,
        "memory_limit": 1,
        "request_timeout_s": 0.001,
        "poll_s": 0.01,
        "drain_s": 0.0,
    }

    def shown(self, name: str) -> str:
        """Return the option of the command line."""
        return f"--{name.replace('_', '-')}"

    def admin_token(self) -> str:
        """Return what the file of the token has now; empty: there is none (`ArgumentInvalid`: it has no token)."""
        if (file := self.admin_token_file) is None:
            return ""
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError):
            token = ""
        if not token:
            raise ArgumentInvalid(f"`--admin-token-file`: `{file}` holds no token")
        return token

    @property
    def threads_per_worker(self) -> int:
        """Threads of an operator in each worker."""
        return self.threads or max(1, usable_cores() // self.workers)


def own_cores() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many processors this process may keep busy: at most what its container has whole, by Linux's file."""
    cores = own_cores()
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cores, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file; or `max`: no quota
        return cores


def sentences_of(record: type) -> dict[str, str]:
    """Return the sentences about the fields of a record, by name, from its docstring."""
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", getdoc(record) or "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}


def options_of(given: Mapping[str, Any]) -> ServeOptions:
    """Return the options of a command line, by name; `limits` as its text.

    Raises:
        ArgumentInvalid: a value is out of range, or the repository is no directory.
    """
    values: dict[str, Any] = {**given, "limits": limits_of(given["limits"])}
    options = ServeOptions(**values)
    if not options.repository.is_dir():
        raise ArgumentInvalid(f"`{options.repository}` is no directory; name a bundle, or a directory of bundles")
    if not re.fullmatch(r"newest|all|[1-9]\d*(,[1-9]\d*)*", options.serve_versions, re.ASCII):
        raise ArgumentInvalid(f"`--serve-versions`: expected newest, all or numbers, got `{options.serve_versions}`")
    if options.admin_token_file is not None:
        options.admin_token()
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ArgumentInvalid("`--tls-cert` and `--tls-key` belong together")
    return options


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
