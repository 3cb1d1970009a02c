"""Requests of many clients, answered by a bundle's server and by peers behind the same server of KServe."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Spread
from benchmarks.meters import wall_s
from benchmarks.processes import NotMeasured
from benchmarks.run import Run
from benchmarks.servers.load import Load, first_answer, load, message
from benchmarks.servers.models import SERVED, ServedModel
from benchmarks.suites.interface import Suite

CLIENTS = (1, 16, 64)
SYSTEMS = ("eager", "bundle", "ONNX Runtime", "empty")
_MOST_ROUNDS = 3
_ROUND_S = 4.0


def _figures(run: Run) -> Iterator[Figure]:
    for model in (SERVED[name] for name in run.model_names or SERVED if name in SERVED):
        with tempfile.TemporaryDirectory(prefix="served-") as directory:
            yield from _of_model(run, model, Path(directory))


def _of_model(run: Run, model: ServedModel, directory: Path) -> Iterator[Figure]:
    title = Figure(suite="serve", model=model.name, measure="", system="")
    if importlib.util.find_spec("kserve") is None:
        reason = "needs KServe: `make bench-serve`"
        yield Figure(suite="serve", model=model.name, measure="request", system="bundle", reason=reason)
        return
    run.progress(f"prepare {model.name} for servers")
    model.export(directory / model.name)
    model.export_onnx(directory / "model.onnx")
    messages = [message(model.name, inputs, "127.0.0.1") for inputs in model.requests(64)]
    samples: dict[tuple[int, str], list[Load]] = {}
    starts: dict[str, list[float]] = {}
    expected: np.ndarray | None = None
    for round_ in range(min(run.rounds, _MOST_ROUNDS)):
        for system in SYSTEMS if round_ % 2 == 0 else reversed(SYSTEMS):
            run.settings.patience_s()
            run.progress(f"serve: {model.name} by {system}, round {round_ + 1}")
            with _server(system, model, directory, run.settings.threads) as (port, ready_s):
                starts.setdefault(system, []).append(ready_s)
                if system != "empty":
                    found = first_answer(port, model.name, model.requests(1)[0], model.output)
                    expected = found if expected is None else expected
                    if not np.allclose(found, expected, rtol=1e-3, atol=1e-4):
                        raise NotMeasured(f"{system} answers otherwise than eager")
                load(port, messages, clients=4, seconds=1.0)
                for clients in CLIENTS:
                    seen = load(port, messages, clients=clients, seconds=_ROUND_S)
                    samples.setdefault((clients, system), []).append(seen)
    yield from _rows(title, "until ready", {system: starts[system] for system in SYSTEMS})
    for clients in CLIENTS:
        own = {system: samples[clients, system] for system in SYSTEMS}
        people = f"{clients} client{'s' * (clients > 1)}"
        for measure, value in MEASURES.items():
            yield from _rows(
                title, f"{people}, {measure}", {s: [value(each) for each in loads] for s, loads in own.items()}
            )


MEASURES: dict[str, Callable[[Load], float]] = {
    "time per request": lambda seen: seen.request_s,
    "p50": lambda seen: seen.quantile_s(0.5),
    "p99": lambda seen: seen.quantile_s(0.99),
}


def _rows(title: Figure, measure: str, seconds: dict[str, list[float]]) -> Iterator[Figure]:
    for system, own in seconds.items():
        value = Spread.of(own)
        relative = value.over(Spread.of(seconds["eager"]))
        figure = dataclasses.replace(title, measure=measure, system=system)
        yield dataclasses.replace(figure, value=value, relative=relative)


@contextlib.contextmanager
def _server(system: str, model: ServedModel, directory: Path, threads: int) -> Iterator[tuple[int, float]]:
    """Start a server; yield its port and how long it took to be ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if system == "bundle":
        command = ["aotexport_runtime", "serve", str(directory / model.name), "--access-log", "off"]
        command += ["--http-port", str(port), "--grpc-port", "0", "--threads", str(threads)]
    else:
        command = ["benchmarks.servers.peers", system, model.name, str(directory), str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    begin = wall_s()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=errors, stderr=errors, env=environment, start_new_session=True
        )
        try:
            _wait(process, port, errors)
            yield port, wall_s() - begin
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, errors: Any) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.05)
    errors.seek(0)
    raise NotMeasured(errors.read().decode(errors="replace")[-300:])


SERVE = Suite(
    "serve",
    "requests behind KServe's server; a time per request is that of all clients together",
    _figures,
    relative_to="x eager",
)
