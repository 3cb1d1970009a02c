"""One process of a server: its models, HTTP, gRPC, and the signs of life that its parent waits for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.schema.manifest import TRANSFORMERS
from aotexport_runtime.server.bundles import OWN, adapters_beside, options_beside
from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.plane import BundlePlane
from aotexport_runtime.server.endpoints.rest import RestServer
from aotexport_runtime.server.endpoints.rpc import start_grpc
from aotexport_runtime.server.logs import log_as_json
from aotexport_runtime.server.marks import Marks
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.repository import Repository
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.serving.servable import Servable
from aotexport_runtime.values.arguments import check_torch

if TYPE_CHECKING:
    from aotexport_runtime.server.repository import AnyServable

log = logging.getLogger("aotexport_runtime.server")

BEAT_S = 2.0
_CLOSING_S = 3.0
"""Time that a worker takes to end beyond that for its last requests: less than its parent waits."""


def work(options: ServeOptions, ports: list[socket.socket], grpc_port: int, marks: Path, life: Connection) -> None:
    """Serve until SIGTERM, or until the parent is gone, which sees in `life` since when it has not come further."""
    log_as_json()
    faulthandler.enable()  # a crash says where
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, ports, grpc_port, marks, life))


async def _serve(
    options: ServeOptions, ports: list[socket.socket], grpc_port: int, directory: Path, life: Connection
) -> None:
    told, again, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    for number, tell in ((signal.SIGTERM, told.set), (signal.SIGINT, told.set), (signal.SIGHUP, again.set)):
        loop.add_signal_handler(number, tell)
    repository = Repository(
        options.repository,
        lambda path: make_servable(path, options),
        name=options.name,
        versions=options.serve_versions,
        required=options.require,
        strict=options.readiness == "strict",
        most_nbytes=options.memory_limit,
        watcher=metrics.count_event,
    )
    marks = Marks(directory)
    plane = BundlePlane(repository, options, marks)
    with _told():
        repository.find()
    watching = threading.Thread(target=watch, args=(repository, marks, options.poll_s, again, ended), daemon=True)
    watching.start()
    beating = asyncio.create_task(beat(repository, life))
    rpc = await start_grpc(plane, options, grpc_port)
    rests = [RestServer(plane, options, is_admin=index > 0) for index in range(len(ports))]
    serving = [asyncio.create_task(rest.serve(port)) for rest, port in zip(rests, ports, strict=True)]
    for task in serving:
        task.add_done_callback(lambda _: told.set())
    await told.wait()
    # A load that does not come to an end, on a file system that is gone for one, keeps nobody.
    ending = threading.Timer(options.drain_s + _CLOSING_S, _end_at_once)
    ending.daemon = True
    ending.start()
    await plane.drain()
    for rest in rests:
        rest.stop()
    await asyncio.gather(*serving, rpc.stop(1))
    beating.cancel()
    ended.set()
    again.set()
    await asyncio.to_thread(repository.close)
    if plane.spans is not None:
        await asyncio.to_thread(plane.spans.shutdown)
    log.info("worker has drained")


def _end_at_once() -> None:
    log.error("worker has not drained, and ends")
    os._exit(1)


def make_servable(path: Path, options: ServeOptions) -> AnyServable:
    """Return the servable of a bundle, and of the adapters beside it; of a language model, its generator."""
    own = {each.name: getattr(options, each.name) for each in dataclasses.fields(ServableOptions)}
    own |= {name: value for name, value in options_beside(path).items() if name in OWN}
    own["adapters"] = adapters_beside(path)
    if TRANSFORMERS not in open_bundle(path, limits=options.limits).manifest.extensions:
        return Servable(path, **own)
    check_torch("a model that generates")
    from aotexport_runtime.serving.generator import Generator

    return Generator(path, **own)


def watch(repository: Repository, marks: Marks, poll_s: float, again: threading.Event, ended: threading.Event) -> None:
    """Look at the repository until the end; `again`: at once, and try again what has failed."""
    while not ended.is_set():
        with _told():
            repository.scan()
            marks.follow(repository)
        if again.wait(poll_s):
            again.clear()
            repository.forget_failures()


@contextlib.contextmanager
def _told() -> Generator[None]:
    """Tell in the log what goes wrong in the block; the models that are served stay."""
    try:
        yield
    except Exception:
        log.exception("the repository cannot be looked at")


async def beat(repository: Repository, life: Connection) -> None:
    """Tell since when a batch runs, or that none does, and drain when nobody is left to hear it."""
    while True:
        try:
            life.send(repository.running_since or time.monotonic())
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        metrics.note_memory()
        metrics.EMPTY.set(bool(repository.is_empty))
        for model in [*repository.models.values()]:
            metrics.WAITING.labels(model.name).set(sum(each.servable.waiting for each in model.served.values()))
        await asyncio.sleep(BEAT_S)


# Workers are forks of a process that has imported this: objects that no collection touches stay in shared pages.
gc.collect()
gc.freeze()
