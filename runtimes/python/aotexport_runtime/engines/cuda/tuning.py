"""Candidates of a kernel timed at its first launch, on copies of its arguments.

Tuning changes nothing but which candidate runs; a kernel that cannot be timed runs its first candidate.
"""

from __future__ import annotations

import copy
import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.engines.cuda.launch import Launcher
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.user_cache import Measurements

log = logging.getLogger("aotexport_runtime")

REPETITIONS = 5
_FASTEST = "candidate"


def device_time(prepare: Callable[[], None], launch: Callable[[], None]) -> float:
    """Return how long the current CUDA stream takes for the work of `launch`, in milliseconds.

    `prepare` runs before each launch, and is not timed.
    """
    launch()  # Code is loaded at the first launch.
    times: list[float] = []
    for _ in range(REPETITIONS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        prepare()
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def may_measure() -> bool:
    """Return whether launches can be timed now: no graph is being captured, and algorithms may be nondeterministic."""
    return not (torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled())


Kept = Callable[[Sequence[Launcher]], Measurements]
"""Returns where the position of a kernel's fastest candidate is kept, given the launchers of all of them."""


class TunedKernel:
    """Launches the fastest candidate of a kernel."""

    def __init__(self, launchers: Sequence[Launcher], kept: Kept) -> None:
        """Prepare a kernel with a launcher per candidate, the default first."""
        self._launchers = launchers
        self._kept = kept
        self._chosen: Launcher | None = None
        self._lock = threading.Lock()

    def __call__(self, **arguments: Any) -> None:
        """Launch the kernel on the current stream; see `Launcher`."""
        launcher = self._chosen or self._choose(arguments)
        launcher(**arguments)

    def _choose(self, arguments: Mapping[str, Any]) -> Launcher:
        first = self._launchers[0]
        if 0 in first.grid(arguments) or not may_measure():
            return first
        with self._lock:
            if self._chosen is None:
                kept = self._kept(self._launchers)
                position = kept.read().get(_FASTEST)
                if type(position) is not int or not 0 <= position < len(self._launchers):
                    position = fastest(self._launchers, arguments)
                    kept.add(_FASTEST, position)
                self._chosen = self._launchers[position]
                log.debug("kernel %s runs candidate %d", first.kernel.name, position)
            return self._chosen


def fastest(launchers: Sequence[Launcher], arguments: Mapping[str, Any]) -> int:
    """Return the position of the fastest launcher of one kernel; the first where none can be timed."""
    try:
        copies, refresh = _copied(arguments)
    except torch.cuda.OutOfMemoryError:
        return 0
    times: list[float] = []
    for launcher in launchers:
        try:
            times.append(device_time(refresh, lambda launcher=launcher: launcher(**copies)))
        except NotSupported:
            times.append(float("inf"))
    return times.index(min(times))


def _copied(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return arguments with tensors of their own, and what gives these the originals' values: kernels change them.

    Whole storages are copied, each once: a kernel may read beyond a tensor, or take one tensor twice.
    """
    originals = {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in arguments.items()}
    copies = copy.deepcopy(originals)
    tensors = [name for name, value in originals.items() if isinstance(value, torch.Tensor)]

    def refresh() -> None:
        for name in tensors:
            copies[name].untyped_storage().copy_(originals[name].untyped_storage())

    return copies, refresh
