"""CUDA graphs of torch: capture in a pool of memory that the graphs of a program share, replay in order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

_one_at_a_time = threading.Lock()
"""One capture of a process may be under way."""


class TorchCapture:
    """Captures and replays on one device; see `graphs.Capture`.

    Graphs of one pool may use one another's dead memory, and so never run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare for captures on `device`."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._ended: torch.cuda.Event | None = None
        self._ended_on: torch.cuda.Stream | None = None

    def possible(self) -> bool:
        """Return whether nobody else captures on the current stream."""
        return not torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def ordered(self) -> Generator[None, None, None]:
        """Make the current stream wait for the work that the last context put on its stream."""
        stream = torch.cuda.current_stream(self._device)
        if self._ended is not None and self._ended_on != stream:
            stream.wait_event(self._ended)
        yield
        if self._ended is None:
            self._ended = torch.cuda.Event()
        self._ended.record(stream)
        self._ended_on = stream

    def capture(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Return a function that replays `run`, and the results of `run`.

        Raises:
            RuntimeError: it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        # Where a capture fails, torch leaves its stream the current one.
        with _one_at_a_time, torch.cuda.device(self._device), torch.cuda.stream(current):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = run()
        self._pool = graph.pool()
        return graph.replay, outputs
