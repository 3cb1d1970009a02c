"""Requests of many clients, answered by a bundle's server and by peers behind the same server of KServe."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
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
from benchmarks.servers.load import Load, first_answer, first_lit_answer, lit_message, load, message
from benchmarks.servers.models import SERVED, ServedModel
from benchmarks.servers.trees import memory_nbytes, rest_s
from benchmarks.suites.interface import Suite

CLIENTS = (1, 16, 64)
SYSTEMS = ("eager", "bundle", "ONNX Runtime", "LitServe", "empty")
_MOST_ROUNDS = 3
_ROUND_S = 4.0
_REST_S = 3.0


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
    messages = {
        system: [make(model.name, inputs, "127.0.0.1") for inputs in model.requests(64)]
        for system, make in ((system, lit_message if system == "LitServe" else message) for system in SYSTEMS)
    }
    failed: dict[str, str] = {}
    if importlib.util.find_spec("litserve") is None:
        failed["LitServe"] = "needs `pip install litserve`"
    seen: dict[str, dict[str, list[float]]] = {}
    expected: np.ndarray | None = None
    for round_ in range(min(run.rounds, _MOST_ROUNDS)):
        for system in SYSTEMS if round_ % 2 == 0 else reversed(SYSTEMS):
            if system in failed:
                continue
            run.settings.patience_s()
            run.progress(f"serve: {model.name} by {system}, round {round_ + 1}")
            try:
                with _server(system, model, directory, run.settings.threads) as (port, ready_s, process):
                    if system != "empty":
                        found = _first(system, port, model, messages[system][0])
                        expected = found if expected is None else expected
                        if not np.allclose(found, expected, rtol=1e-3, atol=1e-4):
                            raise NotMeasured(f"{system} answers otherwise than eager")
                    values = _measured(port, messages[system], process.pid) | {"until ready": ready_s}
            except (
                NotMeasured,
                RuntimeError,
                OSError,
                EOFError,
            ) as error:  # one that gives up leaves the others measured
                failed[system] = str(error)
                continue
            for measure, value in values.items():
                seen.setdefault(measure, {}).setdefault(system, []).append(value)
        if {"bundle", "empty"} & failed.keys():
            failed["engine"] = "nothing to compare it with"
        else:
            _compare_with_engine(seen, _engine(model, directory, run.settings.threads))
        more = _second_worker(model, directory, run.settings.threads)
        seen.setdefault("memory of a second worker", {}).setdefault("bundle", []).append(more)
    for measure, own in seen.items():
        yield from _rows(title, measure, {system: each for system, each in own.items() if system not in failed})
    for system, reason in failed.items():
        yield dataclasses.replace(title, measure="request", system=system, reason=reason)


def _first(system: str, port: int, model: ServedModel, request: bytes) -> np.ndarray:
    if system == "LitServe":
        return first_lit_answer(port, request)
    return first_answer(port, model.name, model.requests(1)[0], model.output)


def _measured(port: int, messages: list[bytes], pid: int) -> dict[str, float]:
    """Return what one server was seen to do, by measure."""
    load(port, messages, clients=4, seconds=1.0)
    found: dict[str, float] = {}
    for clients in CLIENTS:
        seen = load(port, messages, clients=clients, seconds=_ROUND_S)
        people = f"{clients} client{'s' * (clients > 1)}"
        found |= {f"{people}, {measure}": value(seen) for measure, value in MEASURES.items()}
        if clients == 1:
            found[AROUND] = seen.around_s
            found[COMPUTED] = float(np.median(seen.computed_s))
    return found | {MEMORY: memory_nbytes(pid), "processor time per second at rest": rest_s(pid, _REST_S)}


def _engine(model: ServedModel, directory: Path, threads: int) -> Load:
    """Return what one caller of the bundle sees who asks no server."""
    options = [model.name, str(directory / model.name), str(threads), str(_ROUND_S)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.servers.engine", *options]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    return Load(_ROUND_S, json.loads(done.stdout.splitlines()[-1]))


def _compare_with_engine(seen: dict[str, dict[str, list[float]]], engine: Load) -> None:
    """Note the engine's own times, and what the server of the bundle has added to them in the same round."""
    p50, p99 = engine.quantile_s(0.5), engine.quantile_s(0.99)
    seen["1 client, p50"].setdefault("engine", []).append(p50)
    seen["1 client, p99"].setdefault("engine", []).append(p99)
    seen[COMPUTED] = {"bundle": seen[COMPUTED]["bundle"], "engine": seen["1 client, p50"]["engine"]}
    around = seen[AROUND]
    seen[AROUND] = {system: around[system] for system in ("bundle", "empty")}
    seen.setdefault(ADDED_P50, {}).setdefault("bundle", []).append(around["bundle"][-1] - around["empty"][-1])
    added = seen["1 client, p99"]["bundle"][-1] - 1.1 * p99
    seen.setdefault(ADDED_P99, {}).setdefault("bundle", []).append(added)


def _second_worker(model: ServedModel, directory: Path, threads: int) -> float:
    """Return by how many bytes a second worker makes the server of a bundle larger."""
    sizes: list[int] = []
    messages = [message(model.name, inputs, "127.0.0.1") for inputs in model.requests(8)]
    for workers in ("1", "2"):
        options = ("--workers", workers, "--mapped")
        with _server("bundle", model, directory, threads, options) as (port, _, process):
            # Workers take connections as they come: so many that both have answered.
            load(port, messages, clients=16, seconds=2.0)
            sizes.append(memory_nbytes(process.pid))
    return float(sizes[1] - sizes[0])


MEMORY = "memory after the load"
AROUND = "1 client, p50 of a request without the model's own time"
COMPUTED = "1 client, p50 of the model's own time"
ADDED_P50 = "1 client, p50 without the model's own time, beyond an empty model's"
ADDED_P99 = "1 client, p99 beyond 1.1 x the engine's"
MEASURES: dict[str, Callable[[Load], float]] = {
    "time per request": lambda seen: seen.request_s,
    "p50": lambda seen: seen.quantile_s(0.5),
    "p99": lambda seen: seen.quantile_s(0.99),
}


def _rows(title: Figure, measure: str, values: dict[str, list[float]]) -> Iterator[Figure]:
    for system, own in values.items():
        value = Spread.of(own)
        relative = value.over(Spread.of(values["eager"])) if "eager" in values and all(values["eager"]) else None
        unit = "B" if measure.startswith("memory") else "s"
        figure = dataclasses.replace(title, measure=measure, system=system, unit=unit)
        yield dataclasses.replace(figure, value=value, relative=relative)


@contextlib.contextmanager
def _server(
    system: str, model: ServedModel, directory: Path, threads: int, options: tuple[str, ...] = ()
) -> Iterator[tuple[int, float, subprocess.Popen[bytes]]]:
    """Start a server; yield its port, how long it took to be ready, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if system == "bundle":
        command = ["aotexport_runtime", "serve", str(directory / model.name), "--access-log", "off"]
        command += ["--http-port", str(port), "--grpc-port", "0", "--threads", str(threads), *options]
    elif system == "LitServe":
        command = ["benchmarks.servers.lit", model.name, str(port)]
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
            yield port, wall_s() - begin, process
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
