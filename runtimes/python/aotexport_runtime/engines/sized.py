"""Sizes that are called often get sessions of ONNX models for these sizes alone, where they are clearly faster.

The usual engine serves every call until then. Sessions whose results for a call are the same and the usual engine then
serve in turns; their times decide which of them serves calls of that size from then on, in this process.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.engines.candidates import MODEL_ENGINES
from aotexport_runtime.engines.frozen import Frozen, FrozenModel
from aotexport_runtime.engines.runs import Engines
from aotexport_runtime.errors import AotExportError, NotSupported, first_line
from aotexport_runtime.execution.allocator import give_back_freed_memory
from aotexport_runtime.execution.codegen import Function
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.submodules.tables import LoadedState
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation

log = logging.getLogger("aotexport_runtime")

_LEAST_CALLS, _LEAST_S = 3, 0.5
"""Calls of one size, and seconds in them, before sessions are opened for it."""

_MOST_SIZES, _MOST_NBYTES = 4, 1 << 30
"""Most sizes of a program with sessions of their own, and most memory of these for weights."""

_MOST_WATCHED = 1024
"""Most sizes whose calls are counted."""

_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 5, 101, 2.0
"""Least and most calls that the usual engine and each session run in turns, and seconds of one that are enough.

The median of 101 calls errs by 1 % where the least of 25 errs by 4 %.
"""

CLEARLY = 0.97
"""Most time of an engine that is chosen before the usual one, as a part of its time."""

Opened = Callable[[str, Mapping[str, int]], FrozenModel]
"""Opens the model by the runtime of an engine, for sizes by symbol."""


class _Size:
    """Calls of one size, and the sessions for it that are being tried."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0
        self.is_asked = False
        self.runs: dict[str, Function] = {}
        self.times: dict[str, list[float]] = {"": []}
        """By session; those of the usual engine have no name."""


def _are_enough(times: Sequence[float]) -> bool:
    return len(times) >= _ROUNDS and (len(times) >= _MOST_ROUNDS or sum(times) >= _ENOUGH_S)


class Sized(Frozen):
    """Runs an inference graph by the usual engine, or by a session for the sizes of the call."""

    def __init__(
        self,
        program: Program,
        weights: LoadedState,
        usual: tuple[str, Function],
        open_model: Opened,
        engines: Sequence[str],
        record: Engines,
    ) -> None:
        """Watch calls: `usual` is the name of the engine that serves them, and what runs them by it.

        `engines` are those whose sessions may take its place, `record` tells which do.

        Raises:
            NotSupported: as of `Frozen`.
        """
        super().__init__(program, weights)
        self.target, run = usual
        self._open_model = open_model
        # Of a program of one size, the usual engine has such a session already.
        self._engines = [name for name in engines if program.dimensions or name != self.target]
        self.is_detached = self.target in MODEL_ENGINES
        self._usual: Function = run if self.is_detached else lambda args, symbols: run(self.filled(args), symbols)
        self._record = record
        self._names = {dimension.symbol: dimension.name for dimension in program.dimensions}
        nbytes = sum(tensor.nbytes for tensor in self._tensors)
        self._left = min(_MOST_SIZES, _MOST_NBYTES // max(nbytes, 1))
        self._chosen: dict[tuple[int, ...], Function] = {}
        self._sizes: dict[tuple[int, ...], _Size] = {}
        self._lock = threading.Lock()
        self._clock = time.process_time if self._threads == 1 else time.perf_counter

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        chosen, names = self._chosen, [*self._names]

        def call(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            key = tuple([symbols[name] for name in names])
            run = chosen.get(key)
            if run is not None:
                return run(args, symbols)
            # Another thread's call of the moment is none to measure.
            if self._left + len(self._sizes) == 0 or not self._lock.acquire(blocking=False):
                return self._usual(args, symbols)
            try:
                return self._watched(key, args, symbols, subgraph, fallback)
            finally:
                self._lock.release()

        return call

    def _watched(
        self,
        key: tuple[int, ...],
        args: list[Any],
        symbols: dict[str, int],
        subgraph: Subgraph,
        fallback: Callable[[], Function],
    ) -> tuple[Any, ...]:
        """Run a call by the usual engine, or by a session that is being tried."""
        size, given = self._sizes.setdefault(key, _Size()), list(args)
        name = min(size.times, key=lambda name: len(size.times[name]))
        start, begun = time.perf_counter(), self._clock()
        results = size.runs.get(name, self._usual)(args, symbols)
        size.times[name].append(self._clock() - begun)
        size.calls, size.seconds = size.calls + 1, size.seconds + time.perf_counter() - start
        if size.runs:
            if all(map(_are_enough, size.times.values())):
                self._choose(key, size, symbols)
        elif not size.is_asked and size.calls >= _LEAST_CALLS and size.seconds >= _LEAST_S and self._left:
            size.is_asked, self._left = True, self._left - 1
            # The caller may write to arguments and results before the sessions are open.
            args = [each if index in self._indices else _copied(each) for index, each in enumerate(given)]
            call = args, dict(symbols), [*map(_copied, results)]
            work = threading.Thread(target=self._open, args=(key, size, call, subgraph, fallback), name="sessions")
            try:
                work.start()
            except RuntimeError:  # The system allows no more threads.
                self._choose(key, size, symbols)
        if not self._left or len(self._sizes) > _MOST_WATCHED:
            self._sizes = {each: size for each, size in self._sizes.items() if size.is_asked}
        return results

    def _open(
        self,
        key: tuple[int, ...],
        size: _Size,
        call: tuple[list[Any], dict[str, int], list[Any]],
        subgraph: Subgraph,
        fallback: Callable[[], Function],
    ) -> None:
        """Open sessions for a size, beside calls; one that gives other results for a `call` is left out."""
        (args, symbols, results), found = call, dict[str, Function]()
        for name in self._engines:
            try:
                model = self._open_model(name, symbols)
                run = model.forward_of(subgraph, fallback)
                # The first runs take memory, and more time than later ones.
                seen = [observed(run(list(args), symbols)) for _ in range(_ROUNDS)]
                if model.failure or not all(each.agrees for each in compare(observed(results), seen[0])):
                    raise NotSupported(model.failure or "it has other results")
                found[name] = run
            except (AotExportError, OSError, RuntimeError) as error:  # The files may be gone by now.
                log.info("no session of %s for the sizes %s: %s", name, symbols, first_line(error))
        with self._lock:
            size.runs, size.times = found, {name: [] for name in ("", *found)}
            if not found:
                self._choose(key, size, symbols)

    def _choose(self, key: tuple[int, ...], size: _Size, symbols: Mapping[str, int]) -> None:
        """Let the fastest of those that were tried serve a size."""
        took = {name: statistics.median(size.times[name]) for name in size.runs}
        fastest = min(took, key=took.__getitem__, default="")
        is_clear = bool(took) and took[fastest] <= CLEARLY * statistics.median(size.times[""])
        if is_clear:
            sizes = ", ".join(f"{name} {symbols[symbol]}" for symbol, name in self._names.items())
            self._record.because += f"; {fastest} for {sizes or 'all calls'}, in {took[fastest] * 1e3:.3g} ms"
        self._chosen[key] = size.runs[fastest] if is_clear else self._usual
        size.runs = {}
        del self._sizes[key]
        give_back_freed_memory()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def observed(outputs: Sequence[Any]) -> Observation:
    """Return what a comparison sees of a program's outputs."""
    tensors = {str(i): value for i, value in enumerate(outputs) if isinstance(value, torch.Tensor)}
    facts = {str(i): str(value) for i, value in enumerate(outputs) if not isinstance(value, torch.Tensor)}
    facts |= {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}
    return Observation(facts, {name: tensor.reshape(-1) for name, tensor in tensors.items()})
