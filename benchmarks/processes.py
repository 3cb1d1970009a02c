"""The measured processes, seen from the one that drives them: each gives a sample when asked, and rests in between."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.meters import wall_s

_ROOT = Path(__file__).resolve().parents[1]
_FAREWELL_S = 2.0
"""How long a process may take to end by itself, once it is told to."""


class NotMeasured(Exception):
    """A figure cannot be measured; the message says why, in one line."""


@dataclass(frozen=True)
class Settings:
    """What holds for every process of a run.

    Attributes:
        threads: of torch.
        limit_s: longest wait for one answer: preparing, the first execution, or a round.
        end_s: when the run's time is spent, on the clock of `wall_s`.
    """

    threads: int
    limit_s: float = math.inf
    end_s: float = math.inf

    def patience_s(self) -> float:
        """Return how long to wait for an answer that is asked for now.

        Raises:
            NotMeasured: the run's time is spent.
        """
        left = self.end_s - wall_s()
        if left <= 0:
            raise NotMeasured("the time of the run was spent")
        return min(self.limit_s, left)


class Source(Protocol):
    """Where samples come from."""

    def ready(self) -> None:
        """Return when samples can be taken.

        Raises:
            NotMeasured: there are none.
        """
        ...

    def sample(self) -> dict[str, Any]:
        """Return the next sample.

        Raises:
            NotMeasured: there is none.
        """
        ...

    def close(self) -> None:
        """Give up what the source holds."""
        ...


class Worker:
    """A process that stays: it builds its system and runs it once, and then runs a round per sample."""

    def __init__(self, spec: dict[str, Any], settings: Settings) -> None:
        """Start the process.

        Raises:
            NotMeasured: the run's time is spent.
        """
        settings.patience_s()
        self._settings = settings
        self._first: dict[str, Any] | None = None
        self._errors = _errors()
        self._process = _spawn("benchmarks.worker", spec, settings.threads, self._errors)

    def ready(self) -> None:
        """Wait for the first execution."""
        self.first()

    def first(self) -> dict[str, Any]:
        """Return times and results of the first execution.

        Raises:
            NotMeasured: it failed, or took too long.
        """
        if self._first is None:
            self._first = _answer(self._process, self._errors, self._settings.patience_s())
        return self._first

    def sample(self) -> dict[str, Any]:
        """Run a round."""
        patience_s = self._settings.patience_s()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"round\n")
            self._process.stdin.flush()
        return _answer(self._process, self._errors, patience_s)

    def close(self) -> None:
        """End the process."""
        if not self._errors.closed:
            _end(self._process)
            self._errors.close()


class Group:
    """Processes that run one system together, one per rank: a sample is that of the slowest of them."""

    def __init__(self, spec: dict[str, Any], ranks: int, settings: Settings) -> None:
        """Start the processes.

        Raises:
            NotMeasured: the run's time is spent.
        """
        self._meeting = tempfile.TemporaryDirectory()
        # Rounds of one execution: ranks that ran different numbers of steps would wait for each other.
        spec = {**spec, "ranks": ranks, "store": f"{self._meeting.name}/store", "round_s": 0}
        self._workers = [Worker({**spec, "rank": rank}, settings) for rank in range(ranks)]

    def ready(self) -> None:
        """Wait for the first step of all ranks, and refuse a group whose process failed."""
        self.first()

    def first(self) -> list[dict[str, Any]]:
        """Return times and results of the first step, by rank.

        Raises:
            NotMeasured: it failed, or took too long.
        """
        return [worker.first() for worker in self._workers]

    def sample(self) -> dict[str, Any]:
        """Run a step on all ranks."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            samples = list(pool.map(Worker.sample, self._workers))
        return max(samples, key=lambda sample: sample["wall_s"])

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._meeting.cleanup()


class Fresh:
    """A new process per sample."""

    def __init__(self, spec: dict[str, Any], settings: Settings) -> None:
        self._spec = spec
        self._settings = settings

    def ready(self) -> None:
        """Nothing is started before a sample is asked for."""

    def sample(self) -> dict[str, Any]:
        """Start a process and wait for its answer."""
        patience_s = self._settings.patience_s()
        with _errors() as errors:
            process = _spawn("benchmarks.fresh", {**self._spec, "spawned_s": wall_s()}, self._settings.threads, errors)
            try:
                return _answer(process, errors, patience_s)
            finally:
                _end(process)

    def close(self) -> None:
        """Nothing is held between samples."""


def _errors() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _spawn(module: str, spec: dict[str, Any], threads: int, errors: IO[str]) -> subprocess.Popen[bytes]:
    pools = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # Packages have bytecode once they are installed or were imported, unless the environment forbids to write it.
    settings = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps({**spec, "threads": threads})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        cwd=_ROOT,
        env={**os.environ, **pools, **settings},
        start_new_session=True,  # its compilers end with it
    )


def _answer(process: subprocess.Popen[bytes], errors: IO[str], patience_s: float) -> dict[str, Any]:
    """Return the next line of the process."""
    assert process.stdout is not None
    line = bytearray()
    deadline = wall_s() + patience_s
    while not line.endswith(b"\n"):
        left = max(0.0, deadline - wall_s())
        ready, _, _ = select.select([process.stdout], [], [], None if math.isinf(left) else left)
        if not ready:
            _kill(process)
            raise NotMeasured(f"no answer within {patience_s:.0f} s")
        part = process.stdout.read(1 << 16)
        if not part:
            raise NotMeasured(_last_words(process.wait(), errors))
        line += part
    return json.loads(line)


def _last_words(code: int, errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return f"its process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_FAREWELL_S)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
