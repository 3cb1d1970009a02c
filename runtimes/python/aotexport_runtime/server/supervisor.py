"""The first process of a server: opens its ports, starts workers, replaces those that die or are stuck."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from aotexport_runtime.engines.candidates import MODEL_ENGINES
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.server.logs import log_as_json
from aotexport_runtime.server.options import ServeOptions, own_cores

log = logging.getLogger("aotexport_runtime.server")

_LOOK_S = 0.5
_START_S = 120.0
"""Longest time from the start of a worker to its first sign of life."""
_SETTLED_S = 10.0
"""A worker that dies earlier is not replaced at once."""
_LONGEST_PAUSE_S = 30.0
_SPINS = "10000"
"""Rounds that OpenMP's threads of a worker wait awake for the next operator: enough to bridge two operators, and too
few to keep a busy machine from its work. OpenMP's own 300,000 do."""


@dataclass
class Worker:
    """A worker as its parent sees it; times by `time.monotonic`, which all processes share."""

    process: Any
    life: Connection
    started: float = field(default_factory=time.monotonic)
    stands_since: float | None = None

    def is_stuck(self, longest_s: float) -> bool:
        """Return whether it, or its batch, stands still for so long; before its first sign of life: for a start."""
        with contextlib.suppress(EOFError, OSError):  # it has ended, which its process tells
            while self.life.poll():
                self.stands_since = self.life.recv()
        if self.stands_since is None:
            return time.monotonic() - self.started > _START_S
        return time.monotonic() - self.stands_since > longest_s


class Supervisor:
    """Keeps the workers of a server."""

    def __init__(self, options: ServeOptions, ports: list[socket.socket], grpc_port: int, state: Path) -> None:
        """Start no worker yet, see `run`."""
        self._options = options
        self._ports = ports
        self._grpc_port = grpc_port
        self._marks = state / "unloaded"
        self._marks.mkdir()
        self._context = multiprocessing.get_context("forkserver")
        engine = [] if options.engine in MODEL_ENGINES else ["aotexport_runtime.serving.program"]
        self._context.set_forkserver_preload([*engine, "aotexport_runtime.server.endpoints.worker"])
        self._workers: list[Worker] = []
        self._ending = False
        self._pause_s = 0.0
        self._next_start = 0.0

    def run(self) -> None:
        """Keep the workers until SIGTERM or SIGINT; return when they have drained. SIGHUP goes to them."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        # Workers, and what they are forks of, begin as their parent does.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._start_missing()
        signal.signal(signal.SIGHUP, self._reload)
        while not self._ending:
            self._start_missing()
            wait([worker.process.sentinel for worker in self._workers], _LOOK_S)
            if not self._ending:
                self._remove_ended()
        self._drain()

    def _end(self, number: int, frame: Any) -> None:
        self._ending = True
        for worker in self._workers:
            worker.process.terminate()  # it refuses requests at once; `wait` goes on after this

    def _reload(self, number: int, frame: Any) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(worker.process.pid, number)

    def _start_missing(self) -> None:
        while len(self._workers) < self._options.workers and time.monotonic() >= self._next_start:
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=start, args=(self._options, self._ports, self._grpc_port, self._marks, theirs)
            )
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours))
            log.info("worker starts", extra={"fields": {"worker": process.pid}})

    def _remove_ended(self) -> None:
        longest_s = self._options.request_timeout_s + 5
        for worker in [*self._workers]:
            if not worker.process.is_alive():
                self._note_end(worker, "died")
            elif worker.is_stuck(longest_s):
                worker.process.kill()
                worker.process.join()
                self._note_end(worker, "stuck")

    def _note_end(self, worker: Worker, reason: str) -> None:
        # It reads where to write when it is imported.
        from aotexport_runtime.server.endpoints.metrics import forget_worker

        self._workers.remove(worker)
        lived_s = time.monotonic() - worker.started
        self._pause_s = 0.0 if lived_s > _SETTLED_S else min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._next_start = time.monotonic() + self._pause_s
        fields = {"worker": worker.process.pid, "reason": reason, "exit": worker.process.exitcode}
        log.error("worker has ended", extra={"fields": fields})
        forget_worker(worker.process.pid, reason)
        worker.life.close()

    def _drain(self) -> None:
        for port in self._ports:
            port.close()  # the last worker that closes it closes the port
        for worker in self._workers:
            worker.process.terminate()
        end = time.monotonic() + self._options.drain_s + 5
        for worker in self._workers:
            worker.process.join(max(end - time.monotonic(), 0))
            if worker.process.is_alive():
                log.error("worker does not end", extra={"fields": {"worker": worker.process.pid}})
                worker.process.kill()
                worker.process.join()
        log.info("server has ended")


def serve(options: ServeOptions) -> int:
    """Serve a repository until SIGTERM or SIGINT; return the exit code.

    Raises:
        NotSupported: KServe is not installed, or a port is taken.
    """
    if importlib.util.find_spec("kserve") is None:
        raise NotSupported("`serve` needs KServe's SDK. Install it by `pip install 'aotexport-runtime[serve]'`")
    log_as_json()
    with opened(options) as (ports, grpc_port), tempfile.TemporaryDirectory(prefix="aotexport-serve-") as state:
        metrics = Path(state) / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        options = dataclasses.replace(options, threads=options.threads_per_worker)  # a bound worker sees one processor
        os.environ |= openmp_settings(options, own_cores(), os.environ)
        numbers = dict(zip(("http_port", "admin_port"), (port.getsockname()[1] for port in ports), strict=False))
        fields = {"host": options.host, "grpc_port": grpc_port, **numbers}
        log.info("server listens", extra={"fields": fields})
        Supervisor(options, ports, grpc_port, Path(state)).run()
    return 0


def openmp_settings(options: ServeOptions, processors: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return variables of the environment by which OpenMP's threads of a worker wait, and stay where they are.

    Where one worker has every processor, each thread keeps its own: otherwise a request can wake two on one processor,
    which wait for each other until the kernel moves one. What the given environment sets stays.
    """
    settings: dict[str, str] = {}
    if not given.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        settings["GOMP_SPINCOUNT"] = _SPINS
    has_all = options.workers == 1 and options.threads == processors > 1
    runs_here = options.device == "cpu" and options.engine not in MODEL_ENGINES  # whose threads are not OpenMP's
    if has_all and runs_here and not given.keys() & {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}:
        settings["OMP_PROC_BIND"] = "true"
    return settings


@contextlib.contextmanager
def opened(options: ServeOptions) -> Generator[tuple[list[socket.socket], int]]:
    """Hold the ports: sockets that listen for HTTP and `--admin-port`, and the number of one for gRPC; see `bound`."""
    with contextlib.ExitStack() as stack:
        numbers = [options.http_port] if options.admin_port is None else [options.http_port, options.admin_port]
        ports = [stack.enter_context(bound(options.host, number, shared=False)) for number in numbers]
        for port in ports:
            port.listen(2048)
        with bound(options.host, options.grpc_port, shared=False) as first:
            grpc_port = first.getsockname()[1]
        # It never listens: it keeps the port while no worker does.
        with bound(options.host, grpc_port, shared=True):
            yield ports, grpc_port


def bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket that has a port of the host; 0: any that is free; `shared`: other processes may have it as well.

    Raises:
        NotSupported: it is taken, or the host is no address of this machine.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections have it as well. Without it the kernel holds a response back, after its head, for 40 ms.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise NotSupported(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    return found


def start(*arguments: Any) -> None:
    """Run a worker; see `work`."""
    from aotexport_runtime.server.endpoints.worker import work

    work(*arguments)
