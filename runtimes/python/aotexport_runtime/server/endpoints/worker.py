"""One process of a server: its models, HTTP, gRPC, and the signs of life that its parent waits for."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from aotexport_runtime.server.bundles import adapters_beside
from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.plane import BundleExtension, BundlePlane
from aotexport_runtime.server.endpoints.rest import RestServer
from aotexport_runtime.server.endpoints.rpc import start_grpc
from aotexport_runtime.server.logs import log_as_json
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.repository import Marks, Repository
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.serving.servable import Servable

log = logging.getLogger("aotexport_runtime.server")

BEAT_S = 2.0
_CLOSING_S = 3.0
"""Time that a worker takes to end beyond that for its last requests: less than its parent waits."""


def work(options: ServeOptions, http: socket.socket, grpc_port: int, marks: Path, life: Connection) -> None:
    """Serve until SIGTERM, or until the parent is gone, which sees in `life` whether a batch runs for too long."""
    log_as_json()
    # uvicorn ends by these signals, and raises them again when it is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    asyncio.run(_serve(options, http, grpc_port, marks, life))


async def _serve(options: ServeOptions, http: socket.socket, grpc_port: int, directory: Path, life: Connection) -> None:
    repository = Repository(
        options.repository,
        lambda path: make_servable(path, options),
        name=options.name,
        most_nbytes=options.memory_limit,
        watcher=metrics.count_event,
    )
    marks = Marks(directory)
    plane = BundlePlane(repository, options)
    extension = BundleExtension(plane, marks)
    ended = threading.Event()
    repository.find()
    watching = threading.Thread(target=watch, args=(repository, marks, options, ended), name="watch", daemon=True)
    watching.start()
    beating = asyncio.create_task(beat(repository, options, life))
    rpc = await start_grpc(plane, extension, options, grpc_port)
    await RestServer(plane, extension, options).serve(http)
    # A load that does not come to an end, on a file system that is gone for one, keeps nobody.
    ending = threading.Timer(options.drain_s + _CLOSING_S, _end_at_once)
    ending.daemon = True
    ending.start()
    await rpc.stop(options.drain_s)
    beating.cancel()
    ended.set()
    await asyncio.to_thread(repository.close)
    log.info("worker has drained")


def _end_at_once() -> None:
    log.error("worker has not drained, and ends")
    os._exit(1)


def make_servable(path: Path, options: ServeOptions) -> Servable:
    """Return the servable of a bundle, and of the adapters beside it."""
    own = {each.name: getattr(options, each.name) for each in dataclasses.fields(ServableOptions)}
    return Servable(path, **own | {"adapters": adapters_beside(path)})


def watch(repository: Repository, marks: Marks, options: ServeOptions, ended: threading.Event) -> None:
    """Look at the repository until the end."""
    while not ended.is_set():
        try:
            repository.scan()
            marks.follow(repository)
        except Exception:  # Told in the log; the models that are served stay.
            log.exception("the repository cannot be looked at")
        ended.wait(options.poll_s)


async def beat(repository: Repository, options: ServeOptions, life: Connection) -> None:
    """Give signs of life, and drain when nobody is left to see them."""
    while True:
        since = repository.running_since
        if since is None or time.monotonic() - since <= options.request_timeout_s:
            try:
                life.send(None)
            except OSError:
                os.kill(os.getpid(), signal.SIGTERM)
                return
        metrics.note_memory()
        for model in [*repository.models.values()]:
            if model.served:
                metrics.WAITING.labels(model.name).set(model.served.servable.batcher.waiting)
        await asyncio.sleep(BEAT_S)


# Workers are forks of a process that has imported this: objects that no collection touches stay in shared pages.
gc.collect()
gc.freeze()
