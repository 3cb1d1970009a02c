"""Joins waiting calls to batches, in one thread that runs all operators of a servable, and ends when idle. No torch.

Each such thread has a pool of OpenMP threads, which sleep between operators where pools have more than the processors.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aotexport_runtime.errors import DeadlinePassed, NotSupported, Overloaded, attempt

Run = Callable[[Sequence[Any]], Sequence[Any]]
"""Runs one or more calls as one; returns the result of each."""

_IDLE_S = 5.0
"""The thread ends when nothing has come for so long."""

Result = TypeVar("Result")


class Answer(Future[Any]):
    """The future result of a call, with what it took; cancelled while the call waits, it is not run.

    Attributes:
        waited_s: from its coming to the beginning of its batch, in seconds; 0 before.
        ran_s: how long its batch ran, in seconds; 0 before its end.
        batch_size: of all calls that ran as one; 0 before.
    """

    waited_s: float = 0.0
    ran_s: float = 0.0
    batch_size: int = 0


@dataclass(eq=False, kw_only=True)
class Waiting:
    """A call that waits.

    Attributes:
        call: what `Run` takes.
        function: what is called in place of `Run`.
        key: calls of one key may be joined; None: this one may not.
        size: of its batch.
        deadline: when it is given up, by `time.monotonic` as `since`, when it came; None: never.
    """

    call: Any = None
    function: Callable[[], Any] | None = None
    key: Hashable | None = None
    size: int = 1
    deadline: float | None = None
    since: float = field(default_factory=time.monotonic)
    result: Answer = field(default_factory=Answer)


class Batcher:
    """A bounded queue of calls, and the thread that runs them.

    Attributes:
        max_batch_size: greatest size of a joined batch; a call that is larger runs alone.
        running_since: when the batch that runs began, by `time.monotonic`; None: none runs.
    """

    running_since: float | None = None

    def __init__(self, run: Run, *, max_batch_size: int, max_latency_s: float, max_waiting: int) -> None:
        """Make an empty queue for calls that `run` runs; the first call starts the thread. See `ServableOptions`."""
        self._run = run
        self.max_batch_size = max_batch_size
        self._max_latency_s = max_latency_s
        self._max_waiting = max_waiting
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether one more call would be refused."""
        return len(self._waiting) >= self._max_waiting

    def submit(self, waiting: Waiting) -> Answer:
        """Queue a call; return its future result (`Overloaded`: the queue is full; `NotSupported`: it is closed)."""
        with self._changed:
            if self._closed:
                raise NotSupported("the servable is closed")
            if self.is_full:
                raise Overloaded(
                    f"{self._max_waiting} calls wait already. Try again later, or allow more: `max_waiting`"
                )
            if self._thread is None or not self._thread.is_alive():  # A fork of the process has no such thread.
                self._thread = threading.Thread(target=self._work, name="aotexport batches", daemon=True)
                self._thread.start()
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.result

    def apply(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread, after the calls that wait; return its result, or raise its error."""
        return self.submit(Waiting(function=function)).result()

    def close(self) -> None:
        """Refuse further calls, and return when those that wait are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        """Answer batch after batch, until none comes."""
        while batch := self._next():
            self.running_since = time.monotonic()
            answer(self._run, [each for each in batch if _is_wanted(each)])
            self.running_since = None

    def _next(self) -> list[Waiting]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
            if not self._waiting:
                self._thread = None
                return []
            first = self._waiting[0]

            def is_enough() -> bool:
                size = sum(each.size for each in self._waiting if each.key == first.key)
                return self._closed or first.key is None or size >= self.max_batch_size

            self._changed.wait_for(is_enough, max(first.since + self._max_latency_s - time.monotonic(), 0))
            return self._take()

    def _take(self) -> list[Waiting]:
        """Remove the first call from the queue, and those behind it that it can be joined with."""
        first = self._waiting.popleft()
        taken, left, size = [first], deque[Waiting](), first.size
        for each in self._waiting:
            if first.key is not None and each.key == first.key and size + each.size <= self.max_batch_size:
                taken.append(each)
                size += each.size
            else:
                left.append(each)
        self._waiting = left
        return taken


def _is_wanted(waiting: Waiting) -> bool:
    """Return whether a call is to be run: it is neither cancelled nor past its deadline."""
    if not waiting.result.set_running_or_notify_cancel():
        return False
    if waiting.deadline is not None and time.monotonic() > waiting.deadline:
        allowed_ms = max(waiting.deadline - waiting.since, 0) * 1e3
        waiting.result.set_exception(DeadlinePassed(f"the call waited for {allowed_ms:.0f} ms, and was not run"))
        return False
    return True


def answer(run: Run, batch: Sequence[Waiting]) -> None:
    """Run a batch; where that fails, each call alone, so that each has its own result or error."""
    if not batch:
        return
    began, size = time.monotonic(), sum(each.size for each in batch)
    for each in batch:
        each.result.waited_s, each.result.batch_size = began - each.since, size
    function = batch[0].function
    results = attempt(lambda: run([each.call for each in batch]) if function is None else [function()])
    if isinstance(results, Exception):
        if len(batch) == 1:
            batch[0].result.set_exception(results)
            return
        for each in batch:
            answer(run, [each])
        return
    ran_s = time.monotonic() - began
    for each, result in zip(batch, results, strict=True):
        each.result.ran_s = ran_s
        each.result.set_result(result)
