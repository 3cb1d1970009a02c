"""Joins waiting calls to batches, in one thread that runs all operators of a servable, and ends when idle. No torch.

Each such thread has a pool of OpenMP threads, which sleep between operators where pools have more than the processors.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aotexport_runtime.errors import DeadlinePassed, NotSupported, Overloaded, attempt
from aotexport_runtime.serving.options import ServableOptions

Run = Callable[[Sequence[Any]], Sequence[Any]]
"""Runs one or more calls as one; returns the result of each."""

_QUICK_S = 0.002
"""A batch that takes less may run in the thread that submits it: two changes of threads take a good part of it."""
_IDLE_S = 5.0
"""The thread ends when nothing has come for so long."""
_KEYS = 256
"""Keys whose pace is known; that of the least recent goes."""
_GAIN = 0.05
"""A larger batch has to be faster per row by so much."""
_TRIAL = 32
"""Every so many batches, one of twice the size that gains shows whether that still holds."""

Result = TypeVar("Result")


class Answer(Future[Any]):
    """The future result of a call, with what it took; cancelled while the call waits, it is not run.

    Attributes:
        began: when its batch began, by `time.monotonic`; 0 before.
        waited_s: from its coming until then, in seconds; 0 before.
        ran_s: how long its batch ran, in seconds; 0 before its end.
        engine_ran: when the engine began and ended, as `began`; None: it is not known.
        batch_size: of all calls that ran as one; 0 before.
        is_first: whether it is the first of them.
    """

    began: float = 0.0
    waited_s: float = 0.0
    ran_s: float = 0.0
    engine_ran: tuple[float, float] | None = None
    batch_size: int = 0
    is_first: bool = True


@dataclass(eq=False, kw_only=True)
class Waiting:
    """A call that waits.

    Attributes:
        call: what `Run` takes.
        function: what is called in place of `Run`.
        key: calls of one key may be joined; None: this one may not.
        size: of its batch.
        length: to which calls of one batch are padded, at least; 1: they are not.
        deadline: when it is given up, by `time.monotonic` as `since`, when it came.
    """

    call: Any = None
    function: Callable[[], Any] | None = None
    key: Hashable | None = None
    size: int = 1
    length: int = 1
    deadline: float = math.inf
    since: float = field(default_factory=time.monotonic)
    result: Answer = field(default_factory=Answer)


class Pace:
    """How long batches take, by key and size: as `warm_up` has measured, and every batch since.

    Sizes are rounded up to powers of two; of a size, time grows with the length after padding.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._rates: dict[Hashable, dict[int, float]] = {}
        self._batches = 0

    def note(self, key: Hashable, size: int, seconds: float, length: int = 1) -> None:
        """Take account of a batch."""
        rates, rounded, rate = self._rates.pop(key, {}), _rounded(size), seconds / max(size * length, 1)
        rates[rounded] = rate if rounded not in rates else 0.8 * rates[rounded] + 0.2 * rate
        self._rates[key] = rates
        self._batches += 1
        if len(self._rates) > _KEYS:
            del self._rates[next(iter(self._rates))]

    def most(self, key: Hashable) -> float:
        """Return the size beyond which no throughput is gained, as far as it is known."""
        if not (rates := self._rates.get(key)):
            return math.inf
        enough = min(rates.values()) * (1 + _GAIN)
        size = min(size for size, rate in rates.items() if rate <= enough)
        if size == max(rates):
            return math.inf
        return size if self._batches % _TRIAL else 2 * size

    def seconds(self, key: Hashable, size: int, length: int = 1) -> float:
        """Return how long a batch takes; of a size or key that is not known, by the slowest row that is."""
        known = [self._rates[key]] if key in self._rates else [*self._rates.values()]
        slowest = max((rate for rates in known for rate in rates.values()), default=0.0)
        return size * length * self._rates.get(key, {}).get(_rounded(size), slowest)

    def knows(self, key: Hashable, size: int) -> bool:
        """Return whether a batch of the key, of about the size, has run."""
        return _rounded(size) in self._rates.get(key, {})

    def gains(self, key: Hashable, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Return whether two batches, each a size and a length, gain by joining what padding costs, if it is known."""
        size, length = one[0] + other[0], max(one[1], other[1])
        is_known = one[1] != other[1] and self.knows(key, size)
        return not is_known or self.seconds(key, size, length) <= self.seconds(key, *one) + self.seconds(key, *other)


def _rounded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


class Batcher:
    """A bounded queue of calls, and the thread that runs them.

    Calls are joined as far as that gains throughput, padding included, and the batch takes no more than half the time
    of any.

    Attributes:
        pace: how long batches take.
        max_batch_size: greatest size of a joined batch; a call that is larger runs alone.
        max_waiting: how many calls may wait.
        running_since: when the batch that runs began, by `time.monotonic`; None: none runs.
    """

    running_since: float | None = None

    def __init__(self, run: Run, options: ServableOptions) -> None:
        """Make an empty queue for calls that `run` runs; the first call starts the thread."""
        self._run = run
        self._options = options
        self.pace = Pace()
        self.max_batch_size = options.max_batch_size
        self.max_waiting = options.max_waiting
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._engine = threading.Lock()  # of the thread that runs a batch
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def submit(self, waiting: Waiting, *, at_once: bool = False) -> Answer:
        """Queue a call; return its future result (`Overloaded`: the queue is full; `NotSupported`: it is closed).

        `at_once`: run it here if it is known to be quick, takes one thread of the processor, and none waits or runs.
        """
        if at_once and self._is_quick(waiting) and not self._waiting and self._engine.acquire(blocking=False):
            try:
                if not self._closed:
                    self.begin()
                    self._answer([waiting])
                    return waiting.result
            finally:
                self._engine.release()
        waiting.result.add_done_callback(lambda result: self._forget(waiting) if result.cancelled() else None)
        with self._changed:
            if self._closed:
                raise NotSupported("the servable is closed")
            if len(self._waiting) >= self.max_waiting:
                raise Overloaded(
                    f"{self.max_waiting} calls wait already. Try again later, or allow more: `max_waiting`"
                )
            if self._thread is None or not self._thread.is_alive():  # A fork of the process has no such thread.
                self._thread = threading.Thread(target=self._work, name="aotexport batches", daemon=True)
                self._thread.start()
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.result

    def _forget(self, cancelled: Waiting) -> None:
        with self._changed, contextlib.suppress(ValueError):  # it is in the batch that runs
            self._waiting.remove(cancelled)

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

    def begin(self) -> None:
        """Give the thread that calls it the priority and the threads of an operator that the servable has."""
        if self._options.priority and sys.platform == "linux":
            os.nice(self._options.priority)
        # Threads begin with as many as another servable has set last.
        if self._options.threads is not None and (torch := sys.modules.get("torch")):
            torch.set_num_threads(self._options.threads)

    def _work(self) -> None:
        """Answer batch after batch, until none comes."""
        self.begin()
        while batch := self._next():
            with self._engine:
                self._answer(batch)

    def _answer(self, batch: Sequence[Waiting]) -> None:
        self.running_since = time.monotonic()
        answer(self._run, wanted := [each for each in batch if _is_wanted(each)])
        if wanted and wanted[0].key is not None and (took_s := wanted[0].result.ran_s):
            longest = max(each.length for each in wanted)
            self.pace.note(wanted[0].key, wanted[0].result.batch_size, took_s, longest)
        self.running_since = None

    def _is_quick(self, waiting: Waiting) -> bool:
        key, size, options = waiting.key, waiting.size, self._options
        is_plain = (options.threads, options.device, options.priority, options.max_latency_ms) == (1, "cpu", 0, 0)
        return is_plain and self.pace.knows(key, size) and self.pace.seconds(key, size, waiting.length) < _QUICK_S

    def _next(self) -> list[Waiting]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
            if not self._waiting:
                self._thread = None
                return []
            first = self._waiting[0]

            def is_enough() -> bool:
                size = sum(each.size for each in self._waiting if each.key == first.key)
                return self._closed or first.key is None or size >= self._most(first)

            until = first.since + self._options.max_latency_ms / 1e3
            self._changed.wait_for(is_enough, until - time.monotonic())
            return self._take()

    def _most(self, first: Waiting) -> float:
        return min(self.max_batch_size, self.pace.most(first.key))

    def _take(self) -> list[Waiting]:
        """Remove the first call from the queue, and those that it is to be joined with: the nearest in length."""
        first = self._waiting.popleft()
        key, taken, size, longest, most = first.key, [first], first.size, first.length, self._most(first)
        time_s = first.deadline - first.since
        alike = [each for each in self._waiting if key is not None and each.key == key]
        for each in sorted(alike, key=lambda each: abs(each.length - first.length)):
            joined, length = size + each.size, max(longest, each.length)
            both_s = min(time_s, each.deadline - each.since)
            gains = joined <= most and self.pace.gains(key, (size, longest), (each.size, each.length))
            if gains and 2 * self.pace.seconds(key, joined, length) <= both_s:
                taken.append(each)
                size, longest, time_s = joined, length, both_s
        left = set(self._waiting).difference(taken)
        self._waiting = deque(each for each in self._waiting if each in left)
        return taken


def _is_wanted(waiting: Waiting) -> bool:
    """Return whether a call is to be run: it is neither cancelled nor past its deadline."""
    if not waiting.result.set_running_or_notify_cancel():
        return False
    if time.monotonic() > waiting.deadline:
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
        each.result.began, each.result.waited_s = began, began - each.since
        each.result.batch_size, each.result.is_first = size, each is batch[0]
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
