"""Joined calls: answers as of each alone, in order, and each with its own error."""

import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from aotexport_runtime.errors import DeadlinePassed, NotSupported, Overloaded
from aotexport_runtime.serving import batcher
from aotexport_runtime.serving.batcher import Batcher, Pace, Waiting
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.serving.program import ServedProgram
from aotexport_runtime.serving.servable import Servable
from tests.unit.serving.conftest import digits_model

LONG_MS = 600_000
"""Calls wait for others until the batch is full."""


def ready(path, **options):
    servable = Servable(path, **options)
    servable.warm_up()
    if options.get("max_latency_ms") == LONG_MS:
        servable.batcher.pace = Pace()  # Measured times would decide how many calls make a full batch.
    return servable


def are_of_one_batch(results):
    return len({result["output"].untyped_storage().data_ptr() for result in results}) == 1


def test_calls_that_fill_a_batch_are_run_as_one_and_answered_as_eager_answers_each(exported):
    servable = ready(exported("digits"), max_batch_size=8, max_latency_ms=LONG_MS)
    calls = [torch.rand(size, 8) for size in (1, 3, 2, 2)]
    results = [future.result() for future in [servable.submit({"input": x}) for x in calls]]
    assert are_of_one_batch(results)
    model = digits_model()
    for x, result in zip(calls, results, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(result["output"], model(x))
    servable.close()
    assert servable.batcher.running_since is None


@pytest.mark.parametrize(("name", "argument", "width"), [("attention", "x", 8), ("recurrent", "steps", 4)])
def test_calls_are_joined_along_an_axis_that_is_not_the_first(exported, name, argument, width):
    servable = ready(exported(name), max_batch_size=2, max_latency_ms=LONG_MS)
    calls = [{argument: torch.rand(5, 1, width)} for _ in range(2)]
    joined = [future.result() for future in [servable.submit(call) for call in calls]]
    assert are_of_one_batch(joined)
    for call, result in zip(calls, joined, strict=True):
        torch.testing.assert_close(result["output"], servable.infer(call)["output"])
    servable.close()


def test_shorter_calls_are_padded_where_each_gets_what_it_gets_alone(exported):
    servable = ready(exported("recurrent"), max_batch_size=4, max_latency_ms=LONG_MS, pad="length")
    assert (servable.batch_axes.padded.name, servable.not_joined) == ("length", "")
    calls = [torch.rand(length, 1, 4) for length in (5, 8, 6, 8)]
    for kind in (lambda x: x, lambda x: x.numpy()):
        results = [future.result() for future in [servable.submit({"steps": kind(x)}) for x in calls]]
        for x, result in zip(calls, results, strict=True):
            torch.testing.assert_close(torch.as_tensor(result["output"]), servable.infer({"steps": x})["output"])
    short, long = (servable.submit({"steps": torch.rand(length, 1, 4)}) for length in (4, 5))
    servable.close()
    assert (short.batch_size, long.batch_size) == (1, 1), "half of a batch at most is padding"


def test_call_whose_mask_shows_nothing_is_not_padded(exported):
    servable = ready(exported("masked"), max_batch_size=2, max_latency_ms=LONG_MS, pad="length")
    calls = [{"x": torch.rand(1, size), "mask": torch.ones(1, size, dtype=torch.int64)} for size in (7, 8, 7)]
    calls[2]["mask"][:] = 0
    answers = [servable.submit(call) for call in calls]
    for call, answer in zip(calls, answers, strict=True):
        torch.testing.assert_close(answer.result()["output"], servable.infer(call)["output"])
    assert [answer.batch_size for answer in answers] == [2, 2, 1]


@pytest.mark.parametrize(
    ("name", "pad", "reason"),
    [
        ("peak", "length", "not padded along `length`: padded calls gave other answers than each alone"),
        (
            "words",
            "length",
            "not padded along `length`: operator `aten::sum.dim_IntList` (tests/unit/serving/conftest.py:50) "
            "computes along axis 1 of `self`, where padding may be any number",
        ),
        (
            "words",
            "words",
            "not padded along `words`: no such size stands at most once in each tensor; there are `length`",
        ),
        (
            "digits",
            "batch",
            "not padded along `batch`: no such size stands at most once in each tensor; there are none",
        ),
    ],
)
def test_calls_are_not_padded_where_that_changes_answers_and_the_reason_is_told(name, pad, reason, exported):
    servable = ready(exported(name), pad=pad)
    assert servable.batch_axes.padded is None
    assert servable.not_joined == reason


def test_wrong_call_fails_alone_and_its_batch_is_answered(exported):
    servable = ready(exported("words"), max_batch_size=3, max_latency_ms=LONG_MS)
    good, wrong = np.array([[1, 2, 3]]), np.array([[1, 2, 10]])
    futures = [servable.submit({"ids": ids}) for ids in (good, wrong, good)]
    expected = servable.infer({"ids": good})["output"]
    np.testing.assert_allclose(futures[0].result()["output"], expected)
    np.testing.assert_allclose(futures[2].result()["output"], expected)
    with pytest.raises(IndexError):
        futures[1].result()
    servable.close()


def test_calls_of_many_threads_each_have_their_own_answer(exported):
    servable, model = ready(exported("digits")), digits_model()

    def ask(seed):
        x = torch.rand(1 + seed % 3, 8, generator=torch.Generator().manual_seed(seed))
        got = servable.submit({"input": x.numpy()}).result()["output"]
        with torch.no_grad():
            np.testing.assert_allclose(got, model(x).numpy(), rtol=1e-5, atol=1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(200)))
    servable.close()


FEW = ServableOptions(max_batch_size=4, max_waiting=5, threads=1)


class Gate:
    """Runs batches once it is opened; tells which."""

    def __init__(self):
        self.batches, self.entered, self.opened = [], threading.Event(), threading.Event()
        self.batcher = Batcher(self.run, FEW)

    def run(self, calls):
        self.batches.append(list(calls))
        self.entered.set()
        self.opened.wait()
        return calls

    def submit(self, call, key="a", size=1, deadline=math.inf, length=1):
        waiting = Waiting(call=call, key=key, size=size, deadline=deadline, length=length)
        future = self.batcher.submit(waiting)
        if len(self.batches) == 0:
            self.entered.wait()
        return future

    def finish(self):
        self.opened.set()
        self.batcher.close()


@pytest.fixture
def gate():
    """Return a gate that is closed."""
    gate = Gate()
    yield gate
    gate.finish()


def test_waiting_calls_are_joined_up_to_the_size_in_the_order_in_which_they_came(gate):
    gate.submit("first")
    for call, key, size in (("a1", "a", 1), ("b1", "b", 1), ("a2", "a", 2), ("a3", "a", 2), ("c", None, 1)):
        gate.submit(call, key, size)
    gate.finish()
    assert gate.batches == [["first"], ["a1", "a2"], ["b1"], ["a3"], ["c"]]


@pytest.mark.parametrize(
    ("seconds", "time_s", "batches"),
    [
        ({1: 1, 2: 2, 4: 4}, 100, [[1], [2], [3], [4]]),
        ({1: 1, 2: 1.5, 4: 3}, 100, [[1, 2], [3, 4]]),
        ({1: 1, 2: 1.5, 4: 2}, 100, [[1, 2, 3, 4]]),
        ({1: 1, 2: 1.5, 4: 2}, 3.5, [[1, 2, 3], [4]]),
        ({1: 1, 2: 1.5, 4: 2}, 2.5, [[1], [2], [3], [4]]),
        ({1: 3}, 5.9, [[1], [2], [3], [4]]),
        ({1: 1}, 10, [[1, 2, 3, 4]]),
    ],
)
def test_calls_are_joined_as_far_as_it_gains_and_half_of_their_time(gate, seconds, time_s, batches):
    for size, each_s in seconds.items():
        gate.batcher.pace.note("a", size, each_s)
    gate.submit("first", key=None)
    for call in (1, 2, 3, 4):
        gate.submit(call, deadline=time.monotonic() + time_s)
    gate.finish()
    assert gate.batches[1:] == batches


def test_calls_of_near_lengths_are_joined_and_padding_has_to_gain(gate):
    for size, each_s in {1: 1, 2: 0.9, 4: 0.8}.items():
        gate.batcher.pace.note("a", size, each_s * size * 100, 100)
    gate.submit("first", key=None)
    for length in (60, 100, 62, 99, 61):
        gate.submit(length, length=length)
    gate.finish()
    assert gate.batches[1:] == [[60, 61, 62], [100, 99]]


def test_pace_follows_the_batches_that_run():
    pace = Pace()
    assert (pace.most("a"), pace.seconds("a", 3)) == (math.inf, 0)
    for size, seconds in ((1, 1), (2, 1), (4, 3)):
        pace.note("a", size, seconds)
    assert (pace.most("a"), pace.seconds("a", 3), pace.seconds("a", 8)) == (2, 2.25, 8)
    assert (pace.most("b"), pace.seconds("b", 2)) == (math.inf, 2)
    for _ in range(30):
        pace.note("a", 4, 0.4)
    assert pace.most("a") == math.inf
    assert pace.seconds("a", 4) == pytest.approx(0.4, rel=0.01)
    for key in range(300):
        pace.note(key, 1, 1)
    assert pace.most("a") == math.inf
    assert pace.seconds("a", 4) == 4


def test_call_beyond_the_length_of_the_queue_is_refused(gate):
    for call in range(6):
        gate.submit(call)
    with pytest.raises(Overloaded) as caught:
        gate.submit(6)
    assert str(caught.value) == "5 calls wait already. Try again later, or allow more: `max_waiting`"


def test_cancelled_call_is_not_run(gate):
    gate.submit("first")
    cancelled, other = gate.submit("cancelled"), gate.submit("other")
    assert cancelled.cancel()
    gate.finish()
    assert other.result() == "other"
    assert gate.batches == [["first"], ["other"]]
    with pytest.raises(CancelledError):
        cancelled.result()


def test_call_past_its_deadline_is_not_run(gate):
    gate.submit("first")
    late = gate.submit("late", deadline=time.monotonic())
    gate.finish()
    with pytest.raises(DeadlinePassed) as caught:
        late.result()
    assert str(caught.value) == "the call waited for 0 ms, and was not run"
    assert gate.batches == [["first"]]


def test_functions_and_batches_run_in_one_thread_which_ends_when_nothing_comes(monkeypatch):
    monkeypatch.setattr(batcher, "_IDLE_S", 0.05)
    ran = []
    idle = Batcher(lambda calls: [ran.append(threading.current_thread()) for _ in calls], FEW)
    ran.append(idle.apply(threading.current_thread))
    idle.submit(Waiting(call=1)).result()
    assert ran[0] is ran[1] is not threading.current_thread()
    ran[0].join(10)
    assert not ran[0].is_alive()
    assert idle.apply(threading.current_thread) is not ran[0]
    with pytest.raises(ZeroDivisionError):
        idle.apply(lambda: 1 / 0)
    idle.close()
    with pytest.raises(NotSupported, match="closed"):
        idle.apply(threading.current_thread)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_threads_and_priority_are_those_of_each_servable(exported, monkeypatch):
    monkeypatch.setattr(batcher, "_IDLE_S", 0.05)
    servables = {own: Servable(exported("digits"), threads=own[0], priority=own[1]) for own in ((1, 3), (2, 0))}
    for own, servable in servables.items():
        servable.batcher.apply(threading.current_thread).join(10)  # the next call begins another
        found = servable.batcher.apply(lambda: (torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)))
        assert found == own
        servable.close()
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0
    torch.set_num_threads(torch.get_num_threads())  # of threads that other tests begin


def test_fork_of_a_process_has_a_thread_of_its_own():
    forked = Batcher(lambda calls: calls, FEW)
    assert forked.apply(os.getpid) == os.getpid()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if forked.apply(os.getpid) == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0
    forked.close()


UNLIKE = {
    "seconds": 0.003,
    "key": "of no known pace",
    "threads": 2,
    "priority": 1,
    "device": "cuda",
    "max_latency_ms": 1,
}


@pytest.mark.parametrize("own", [{}, *({name: value} for name, value in UNLIKE.items())], ids=str)
def test_quick_call_runs_at_once_in_the_thread_that_submits_it(own):
    options = {"threads": 1, "seconds": 0.001, "key": "a"} | own
    seconds, key = options.pop("seconds"), options.pop("key")
    quick = Batcher(lambda calls: [threading.current_thread() for _ in calls], ServableOptions(**options))
    quick.pace.note("a", 1, seconds)
    ran = [quick.submit(Waiting(key=key), at_once=at_once).result() for at_once in (True, False)]
    assert [each is threading.current_thread() for each in ran] == [not own, False]
    quick.close()
    with pytest.raises(NotSupported, match="closed"):
        quick.submit(Waiting(key=key), at_once=True)


def test_call_waits_for_the_batch_that_runs_however_quick_it_is(gate):
    gate.batcher.pace.note("a", 1, 0.001)
    gate.submit("first")
    second = gate.batcher.submit(Waiting(call="second", key="a"), at_once=True)
    assert not second.done()
    gate.finish()
    assert gate.batches == [["first"], ["second"]]


def test_every_operator_of_a_servable_runs_in_its_thread(exported, monkeypatch):
    seen = set()
    run = ServedProgram.run
    monkeypatch.setattr(ServedProgram, "run", lambda *args: (seen.add(threading.current_thread().name), run(*args))[1])
    servable = ready(exported("digits"))
    x = np.ones((2, 8), np.float32)
    np.testing.assert_array_equal(
        servable.infer({"input": x})["output"], servable.submit({"input": x}).result()["output"]
    )
    servable.close()
    assert seen == {"aotexport batches"}
