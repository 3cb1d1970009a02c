"""The time of a recorded call by its nodes: operators, modules, lines of the user's code."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import IO, Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.source import Origin, is_defined, origin
from aotexport_runtime.inspection.recorded import recorded_call
from aotexport_runtime.module.loading import LoadOptions, load_module


@dataclass
class NodeTimes:
    """Seconds of a run by node.

    Attributes:
        total: of the whole run, as it takes without a watch on its lines.
        by_node: of each node that ran, by its place in generated code.
    """

    total: float
    by_node: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])

    def by(self, key: Callable[[Origin], str | None]) -> dict[str, float]:
        """Return seconds by what `key` says of a node, the most first; nodes of which it says None are left out."""
        found: dict[str, float] = {}
        for place, seconds in self.by_node.items():
            node = origin(*place)
            name = None if node is None else key(node)
            if name is not None:
                found[name] = found.get(name, 0.0) + seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure(run: Callable[[], Any], rounds: int = 5) -> NodeTimes:
    """Return the time of `run`, which calls a module by generated code: the median of `rounds`, after two calls."""
    run()
    run()
    plain: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        plain.append(time.perf_counter() - start)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for place, seconds in _watched(run).items():
            found.setdefault(place, []).append(seconds)
    return NodeTimes(median(plain), {place: median(seconds) for place, seconds in found.items()})


def profile(bundle: Bundle, options: LoadOptions, program: str | None, trace: IO[str] | None) -> tuple[str, NodeTimes]:
    """Return the program that ran, the first by default, and the time of its first recorded call.

    `options`: how to load it, by its graphs. `trace`: file to write with a trace of one call, by `torch.profiler`.

    Raises:
        BundleInvalid: no such program.
        NotSupported: it has no recorded call, or cannot run here.
    """
    name = program or bundle.program_names[0]
    record = bundle.program(name)
    run = recorded_call(load_module(bundle, options), record)
    if run is None:
        raise NotSupported(f"program `{name}` has no recorded call to run")
    times = measure(run)
    if trace is not None:
        with torch.profiler.profile(profile_memory=True) as profiled:
            run()
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch, "trace.json")
            profiled.export_chrome_trace(str(file))
            trace.write(file.read_text(encoding="utf-8"))
    return name, times


def _watched(run: Callable[[], Any]) -> dict[tuple[str, int], float]:
    """Return the seconds of each line of generated code in a run."""
    found: dict[tuple[str, int], float] = {}

    def local(place: tuple[str, int], since: float) -> Callable[..., Any]:
        def event(frame: FrameType, kind: str, _: Any) -> Any:
            nonlocal place, since
            now = time.perf_counter()
            found[place] = found.get(place, 0.0) + now - since
            place, since = (place[0], frame.f_lineno), time.perf_counter()
            return event

        return event

    def entered(frame: FrameType, kind: str, _: Any) -> Any:
        # Of other code nothing is asked but its calls.
        frame.f_trace_lines = is_defined(frame.f_code.co_filename)
        if not frame.f_trace_lines:
            return None
        return local((frame.f_code.co_filename, frame.f_lineno), time.perf_counter())

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        run()
    finally:
        sys.settrace(before)
    return found
